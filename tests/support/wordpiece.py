"""Saves tiny random checkpoints of BERT's families, with a newly trained WordPiece tokenizer."""

import json
import string
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sentence_transformers import SparseEncoder
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, BertTokenizerFast, PreTrainedModel

from tests.support.checkpoints import plain_corpus, spread_weights

# The configuration that PyLate writes.
PYLATE = {
    "model_type": "ColBERT",
    "prompts": {},
    "similarity_fn_name": "MaxSim",
    "query_prefix": "[unused0]",
    "document_prefix": "[unused1]",
    "query_length": 24,
    "document_length": 50,
    "attend_to_expansion_tokens": False,
    "do_query_expansion": True,
    "skiplist_words": list(string.punctuation),
}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]"]
MAX_LENGTH = 128
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": MAX_LENGTH,
}


# RoBERTa's positions begin behind that of the padding.
ROBERTA: dict[str, Any] = {
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "max_position_embeddings": MAX_LENGTH + 2,
}


MPNET = {"pad_token_id": 1, "max_position_embeddings": MAX_LENGTH + 2}
# Tokens of ModernBERT attend to 16 on either side in every second layer.
MODERNBERT: dict[str, Any] = {
    "pad_token_id": 0,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "local_attention": 64,
    "global_attn_every_n_layers": 2,
}


def save_wordpiece_tokenizer(folder: Path) -> int:
    """Train BERT's tokenizer, with punctuation, and return the size of its vocabulary."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator([*plain_corpus(300), *[string.punctuation] * 9], trainer)
    ids = {token: tokenizer.token_to_id(token) or 0 for token in SPECIAL}
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"])
    )
    BertTokenizerFast(tokenizer_object=tokenizer, model_max_length=MAX_LENGTH).save_pretrained(
        folder
    )
    return int(tokenizer.get_vocab_size())


def save_model(
    folder: Path, model: type[PreTrainedModel], *, tokenizer_of: Path | None = None, **changes: Any
) -> Path:
    """Save a checkpoint of that class of transformers, 64 wide and two layers deep.

    Its tokenizer is that of the folder `tokenizer_of`, or else a new one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer_of is None:
        vocabulary = save_wordpiece_tokenizer(folder)
    else:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
        tokenizer.model_max_length = MAX_LENGTH
        tokenizer.save_pretrained(folder)
        vocabulary = len(tokenizer)
    torch.manual_seed(3)
    config = model.config_class(**{"vocab_size": vocabulary} | SIZES | changes)
    model(config).save_pretrained(folder)
    spread_weights(folder)
    return folder


def save_colbert(
    folder: Path, model: type[PreTrainedModel], *, width: int = 16, **changes: Any
) -> Path:
    """Save a model with a projection and the two markers of PyLate's configuration.

    `changes` apply to PyLate's configuration if it has such a member, else to the model's.
    """
    settings = PYLATE | {name: changes.pop(name) for name in PYLATE if name in changes}
    save_model(folder, model, **changes)
    save_dense(folder / "1_Dense", SIZES["hidden_size"], width)
    dense = {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"}
    kind = "sentence_transformers.models.Transformer"
    modules = [{"idx": 0, "name": "0", "path": "", "type": kind}, dense]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 31}')
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


def save_dense(folder: Path, inner: int, outer: int) -> None:
    """Save a random linear layer as `Dense` of sentence-transformers."""
    folder.mkdir()
    torch.manual_seed(inner * outer)
    save_file({"linear.weight": torch.randn(outer, inner)}, folder / "model.safetensors")
    activation = "torch.nn.modules.linear.Identity"
    config = {"in_features": inner, "out_features": outer, "bias": False}
    (folder / "config.json").write_text(json.dumps(config | {"activation_function": activation}))


def save_splade(folder: Path, model: type[PreTrainedModel], **changes: Any) -> Path:
    """Save a masked language model with `SpladePooling` of sentence-transformers."""
    save_model(folder, model, **changes)
    SparseEncoder(str(folder), device="cpu").save_pretrained(str(folder))
    return folder


def change(path: Path, **members: object) -> None:
    """Set members of a JSON object in a file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | members))


def keep_capital_letters(folder: Path) -> None:
    """Make a tokenizer keep capital letters, although its vocabulary has none."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] |= {"lowercase": False, "strip_accents": False}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    change(folder / "tokenizer_config.json", do_lower_case=False, strip_accents=False)
