"""Saves tiny random checkpoints of many families, as sentence-transformers does."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from smart_embedder.kernels.target import Target
from smart_embedder.models.heads.dense import DenseEmbedder
from smart_embedder.models.loader import load_embedder
from smart_embedder.requests import Outputs
from tests.support.checkpoints import corpus, save_byte_level_tokenizer, spread_weights

WIDTH = 64
# Among them an empty text, one without letters, one beyond every window, and one that is cut.
TEXTS = ["hybrid search", "", "vector", " ".join(corpus(4)), "...", " ".join(corpus(40)), "Query"]
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_VOCABULARY = 700
SIZES = {
    "vocab_size": _VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 258,
    "pad_token_id": 0,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
_MODERNBERT = {
    "local_attention": 16,
    "global_attn_every_n_layers": 2,
    "bos_token_id": 2,
    "cls_token_id": 2,
    "eos_token_id": 3,
    "sep_token_id": 3,
}
_EMBEDDING_GEMMA = {
    "head_dim": 16,
    "sliding_window": 16,
    "use_bidirectional_attention": True,
    "layer_types": ["sliding_attention", "full_attention"],
}
_T5 = {"vocab_size": _VOCABULARY, "d_model": WIDTH, "d_kv": 16, "d_ff": 96}
_T5 |= {"num_layers": 2, "num_heads": 4}
_DISTILBERT = {"vocab_size": _VOCABULARY, "dim": WIDTH, "n_layers": 2, "n_heads": 4}
_DISTILBERT |= {"hidden_dim": 96, "max_position_embeddings": 258}
# A window beyond every text of the trial at startup.
_MISTRAL = GROUPED | {"max_position_embeddings": 3000, "sliding_window": 1000}
_MOBILEBERT = {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32}

# The configuration and model class of transformers, sizes, and the layout of batches.
FAMILIES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "modernbert": ("ModernBert", "Model", SIZES | _MODERNBERT, "packed"),
    "embedding-gemma": ("Gemma3Text", "Model", GROUPED | _EMBEDDING_GEMMA, "packed"),
    "qwen2-bidirectional": ("Qwen2", "Model", GROUPED | {"is_causal": False}, "packed"),
    "qwen2-causal": ("Qwen2", "Model", GROUPED, "packed"),
    "qwen3-bidirectional": (
        "Qwen3", "Model", GROUPED | {"is_causal": False, "head_dim": 16}, "packed",
    ),
    "mpnet": ("MPNet", "Model", SIZES | {"pad_token_id": 1}, "padded"),
    "distilbert": ("DistilBert", "Model", _DISTILBERT, "packed"),
    "nomic-bert": ("NomicBert", "Model", SIZES, "packed"),
    "gte": ("Gte", "Model", SIZES, "packed"),
    "eurobert": ("EuroBert", "Model", SIZES, "packed"),
    "electra": ("Electra", "Model", SIZES, "packed"),
    "camembert": ("Camembert", "Model", SIZES | {"pad_token_id": 1}, "own"),
    "t5": ("T5", "EncoderModel", _T5, "padded"),
    "mistral": ("Mistral", "Model", _MISTRAL, "packed"),
    "convbert": ("ConvBert", "Model", SIZES | {"embedding_size": WIDTH}, "one_length"),
    "fnet": ("FNet", "Model", SIZES | {"type_vocab_size": 2}, "one_length"),
    "mobilebert": ("MobileBert", "Model", SIZES | _MOBILEBERT, "one_length"),
    "nystromformer": ("Nystromformer", "Model", SIZES, "one_length"),
    "bert": ("Bert", "Model", SIZES, "own"),
    "roberta": ("Roberta", "Model", SIZES | {"pad_token_id": 1}, "own"),
}  # fmt: skip


_PLAIN = {
    "vocab_size": 120,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 192,
    "max_position_embeddings": 3000,
}
# Families with this service's own layers, by the names of transformers.
OWN_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "xlm-roberta": ("XLMRoberta", {"pad_token_id": 1}),
    "roberta": ("Roberta", {"pad_token_id": 1}),
    "bert": ("Bert", {"pad_token_id": 0}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
}


def save_transformer(folder: Path, family: str, *, kind: str = "Model", **changes: Any) -> Path:
    """Save a random checkpoint of one of `OWN_FAMILIES`, without a tokenizer."""
    name, sizes = OWN_FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**_PLAIN | sizes | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}{kind}")(config)
    for parameter_name, parameter in model.named_parameters():
        is_scale = "norm" in parameter_name.lower() and parameter_name.endswith("weight")
        torch.nn.init.normal_(parameter, mean=float(is_scale), std=0.1)
    model.save_pretrained(folder)
    return folder


def save_family(folder: Path, family: str, tokenizer: Tokenizer) -> Path:
    """Save a random checkpoint of one of `FAMILIES`, with mean pooling."""
    torch.manual_seed(4)
    name, kind, sizes, _ = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**sizes)
    getattr(transformers, f"{name}{kind}")(config).save_pretrained(folder)
    spread_weights(folder)
    if family.startswith("qwen"):  # transformers always loads its own class of tokenizer.
        save_byte_level_tokenizer(folder, ("yes", "no"), template_adds_end=True)
    else:
        save_tokenizer(folder, tokenizer)
    return save_modules(folder)


def word_tokenizer() -> Tokenizer:
    """Train a WordPiece tokenizer that keeps capital letters."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=_VOCABULARY - 10, special_tokens=_SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator([*corpus(400), "Query Document"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Save a tokenizer so that transformers reads it as it is for every family."""
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    tokens = dict(zip(names, _SPECIAL, strict=True))
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)
    saved.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}))


def save_modules(
    folder: Path,
    pooling: Mapping[str, Any] | None = None,
    further: Sequence[tuple[str, Mapping[str, Any], torch.nn.Module | None]] = (),
    *,
    texts: Mapping[str, Any] | None = None,
    prompts: Mapping[str, Any] | None = None,
) -> Path:
    """Write a sentence-transformers configuration, in the form of its older versions.

    `pooling` configures `1_Pooling`; `further` modules have a class, a configuration and a layer.
    """
    named = [("Pooling", pooling or {"pooling_mode_mean_tokens": True}, None), *further]
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    ]
    for index, (kind, config, layer) in enumerate(named, 1):
        path = folder / f"{index}_{kind}"
        path.mkdir(exist_ok=True)
        width = {"word_embedding_dimension": WIDTH} if kind == "Pooling" else {}
        (path / "config.json").write_text(json.dumps({**width, **config}))
        if layer is not None:
            prefix = "norm" if kind == "LayerNorm" else "linear"
            state = {f"{prefix}.{name}": tensor for name, tensor in layer.state_dict().items()}
            torch.save(state, path / "pytorch_model.bin")
        modules.append(_module(index, path.name, kind))
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 200, "do_lower_case": False} | dict(texts or {}))
    )
    if prompts is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


def _module(index: int, path: str, kind: str) -> dict[str, Any]:
    kind = f"sentence_transformers.models.{kind}"
    return {"idx": index, "name": str(index), "path": path, "type": kind}


def dense(
    out_features: int, activation: str, *, bias: bool = True
) -> tuple[str, dict[str, Any], torch.nn.Linear]:
    """Return a projection of the pooled vector, for `save_modules`."""
    layer = torch.nn.Linear(WIDTH, out_features, bias=bias)
    config = {
        "in_features": WIDTH,
        "out_features": out_features,
        "bias": bias,
        "activation_function": f"torch.nn.modules.activation.{activation}",
    }
    return "Dense", config, layer


def reference(folder: Path) -> SentenceTransformer:
    """Load the model with sentence-transformers."""
    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def reference_vectors(folder: Path, texts: list[str], **options: Any) -> np.ndarray:
    """Embed the texts with sentence-transformers, one by one."""
    model = reference(folder)
    return np.stack([model.encode([text], **options)[0] for text in texts])


def load(folder: Path, target: Target, max_length: int = 8192, **options: Any) -> DenseEmbedder:
    """Load a dense encoder as the service does."""
    model = load_embedder(folder.name, folder, max_length, target, **options)
    assert isinstance(model, DenseEmbedder)
    return model


def embed(model: DenseEmbedder, texts: list[str], prompt: str = "") -> np.ndarray:
    """Embed the texts in one batch."""
    tokenized = model.tokenize(texts, prompt)
    results: list[Any] = model.forward([text.ids for text in tokenized], Outputs(dense=True))
    return np.stack([result.dense for result in results])


def assert_close(ours: Any, theirs: Any) -> None:
    """Compare float32 numbers up to rounding errors."""
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-5)
