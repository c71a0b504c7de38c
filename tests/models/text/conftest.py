"""A tokenizer of each kind."""

import pytest
from tokenizers import AddedToken, Tokenizer

from tests.models.text.test_slices import qwen_words


@pytest.fixture(scope="session", params=["tiny_m3", "tiny_qwen", "qwen's words", "demo_checkpoint"])
def tokenizer(request) -> Tokenizer:
    """SentencePiece's words, GPT-2's, Qwen's, BERT's word pieces."""
    if request.param == "qwen's words":
        return qwen_words(request.getfixturevalue("tiny_qwen"))
    folder = request.getfixturevalue(request.param)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if request.param == "tiny_m3":  # As in bge-m3's own file.
        tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    return tokenizer
