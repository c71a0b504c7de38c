"""Saves tiny random checkpoints of many families, as sentence-transformers does."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from smart_embedder.kernels.target import Target, choose_backend
from smart_embedder.models.heads.dense import DenseEmbedder
from smart_embedder.models.loader import load_embedder, load_reranker
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
# A window beyond every text of the trial at startup.
_MISTRAL = GROUPED | {"max_position_embeddings": 3000, "sliding_window": 1000}

# The configuration and model class of transformers, sizes, and the layout of batches.
FAMILIES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "modernbert": ("ModernBert", "Model", SIZES | _MODERNBERT, "packed"),
    "embedding-gemma": ("Gemma3Text", "Model", GROUPED | _EMBEDDING_GEMMA, "packed"),
    "qwen2-causal": ("Qwen2", "Model", GROUPED, "packed"),
    "qwen3-bidirectional": (
        "Qwen3", "Model", GROUPED | {"is_causal": False, "head_dim": 16}, "packed",
    ),
    "gte": ("Gte", "Model", SIZES, "packed"),
    "camembert": ("Camembert", "Model", SIZES | {"pad_token_id": 1}, "own"),
    "t5": ("T5", "EncoderModel", _T5, "padded"),
    "mistral": ("Mistral", "Model", _MISTRAL, "packed"),
    "convbert": ("ConvBert", "Model", SIZES | {"embedding_size": WIDTH}, "one_length"),
    "fnet": ("FNet", "Model", SIZES | {"type_vocab_size": 2}, "one_length"),
    "bert": ("Bert", "Model", SIZES, "own"),
    "roberta": ("Roberta", "Model", SIZES | {"pad_token_id": 1}, "own"),
    "xlm-roberta": ("XLMRoberta", "Model", SIZES | {"pad_token_id": 1}, "own"),
    "qwen3": ("Qwen3", "Model", GROUPED | {"head_dim": 16}, "own"),
}  # fmt: skip


def save_transformer(folder: Path, family: str, *, kind: str = "", **changes: Any) -> Path:
    """Save a random checkpoint of one of `FAMILIES`, without a tokenizer."""
    torch.manual_seed(4)
    name, usual_kind, sizes, _ = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**sizes | changes)
    getattr(transformers, f"{name}{kind or usual_kind}")(config).save_pretrained(folder)
    spread_weights(folder)
    return folder


def save_family(folder: Path, family: str, tokenizer: Tokenizer) -> Path:
    """Save a random checkpoint of one of `FAMILIES`, with mean pooling."""
    save_transformer(folder, family)
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


@cache
def float32() -> Target:
    """Return the CPU in float32, with the kernels that the service would choose."""
    cpu = torch.device("cpu")
    return Target(cpu, torch.float32, choose_backend(cpu, torch.float32))


def load(
    folder: Path, target: Target | None = None, max_length: int = 8192, **options: Any
) -> DenseEmbedder:
    """Load a dense encoder as the service does, by default in float32."""
    model = load_embedder(folder.name, folder, max_length, target or float32(), **options)
    assert isinstance(model, DenseEmbedder)
    return model


def load_scorer(folder: Path, max_length: int, kind: str | None = None) -> Any:
    """Load a reranker as the service does, in float32."""
    return load_reranker(folder.name, folder, max_length, float32(), max_pairs=16, kind=kind)


def score(
    model: Any, query: str, passages: list[str], instruction: str | None = None
) -> np.ndarray:
    """Score the passages in one batch."""
    pairs = model.tokenize_pairs(query, passages, instruction)
    return np.array(model.forward([pair.ids for pair in pairs], Outputs()), np.float32)


def reference_scores(
    folder: Path, query: str, passages: list[str], instruction: str | None = None
) -> Any:
    """Score the passages with sentence-transformers, one by one: raw logits."""
    model = CrossEncoder(str(folder), device="cpu", activation_fn=torch.nn.Identity())
    pairs = [(query, passage) for passage in passages]
    return model.predict(pairs, prompt=instruction, batch_size=1)


def embed(model: DenseEmbedder, texts: list[str], prompt: str = "") -> np.ndarray:
    """Embed the texts in one batch."""
    tokenized = model.tokenize(texts, prompt)
    results: list[Any] = model.forward([text.ids for text in tokenized], Outputs(dense=True))
    return np.stack([result.dense for result in results])


def assert_close(ours: Any, theirs: Any) -> None:
    """Compare float32 numbers up to rounding errors."""
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
