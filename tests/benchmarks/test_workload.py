"""Random texts: their lengths in tokens, and the seed."""

import pytest
from tokenizers import Tokenizer

from benchmarks.checkpoints import save_tokenizer
from benchmarks.workload import WORKLOADS, draw_texts

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("name", WORKLOADS)
def test_texts_have_the_lengths_of_their_workload(name: str, tokenizer: Tokenizer) -> None:
    lengths = WORKLOADS[name].lengths
    texts = draw_texts(lengths, 20)
    counts = [len(encoding.ids) for encoding in tokenizer.encode_batch(texts)]
    assert lengths.shortest <= min(counts) <= max(counts) <= lengths.longest
