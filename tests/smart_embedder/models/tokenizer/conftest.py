"""Tokenizers of every kind, and folders with one."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, BertModel, RobertaModel

from tests.support.checkpoints import save_byte_level_tokenizer, save_qwen
from tests.support.wordpiece import ROBERTA, change, save_model
from tests.support.words import qwen_words


@pytest.fixture(scope="session", params=["tiny_m3", "tiny_qwen", "qwen's words", "demo_checkpoint"])
def tokenizer(request) -> Tokenizer:
    """The tokenizers of SentencePiece, GPT-2, Qwen, and BERT's word pieces."""
    if request.param == "qwen's words":
        return qwen_words(request.getfixturevalue("tiny_qwen"))
    folder = request.getfixturevalue(request.param)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if request.param == "tiny_m3":  # As in the file of bge-m3.
        tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    return tokenizer


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
