"""Tokenizers of every kind, and folders with one."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, BertModel, RobertaModel

from tests.support.checkpoints import save_byte_level_tokenizer, save_qwen
from tests.support.tokenizer_kinds import KINDS
from tests.support.wordpiece import ROBERTA, change, save_model


@pytest.fixture(scope="session", params=KINDS)
def tokenizer(request) -> Tokenizer:
    """A tokenizer of each form."""

    def read(name: str) -> Tokenizer:
        return Tokenizer.from_file(str(request.getfixturevalue(name) / "tokenizer.json"))

    return KINDS[request.param](read)


@pytest.fixture(scope="session")
def kinds(tmp_path_factory, tiny_reranker: Path) -> dict[str, Path]:
    """Folders with a tokenizer of each kind, as transformers saves it."""
    root = tmp_path_factory.mktemp("kinds")
    roberta = save_model(root / "roberta", RobertaModel, vocab_size=900, **ROBERTA)
    save_byte_level_tokenizer(roberta, ("yes", "no"), template_adds_end=False)
    change(roberta / "tokenizer_config.json", tokenizer_class="RobertaTokenizer")
    AutoTokenizer.from_pretrained(roberta).save_pretrained(roberta)
    bert = save_model(root / "bert", BertModel)
    qwen = save_qwen(root / "qwen")
    change(qwen / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    AutoTokenizer.from_pretrained(qwen).save_pretrained(qwen)
    return {"bert": bert, "roberta": roberta, "xlm-roberta": tiny_reranker, "qwen": qwen}
