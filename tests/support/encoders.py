"""Tiny random checkpoints of many families, as sentence-transformers saves them."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from smart_embedder.engine.records import Outputs
from smart_embedder.models.families.backbone import Target
from smart_embedder.models.tasks.dense import DenseEmbedder
from smart_embedder.models.tasks.load import load_embedder
from tests.support.checkpoints import corpus, save_byte_level_tokenizer, spread_weights

WIDTH = 64
# One is empty, one has no letters, one is longer than every attention's window, one is cut.
TEXTS = ["hybrid search", "", "vector", " ".join(corpus(4)), "...", " ".join(corpus(40)), "Query"]
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_VOCABULARY = 700
_SIZES = {
    "vocab_size": _VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 258,
    "pad_token_id": 0,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}


def _modernbert() -> PreTrainedModel:
    config = transformers.ModernBertConfig(
        **_SIZES, local_attention=16, global_attn_every_n_layers=2,
        bos_token_id=2, cls_token_id=2, eos_token_id=3, sep_token_id=3,
    )  # fmt: skip
    return transformers.ModernBertModel(config)


def _embedding_gemma() -> PreTrainedModel:
    config = transformers.Gemma3TextConfig(
        **_GROUPED, head_dim=16, sliding_window=16, use_bidirectional_attention=True,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return transformers.Gemma3TextModel(config)


def _t5() -> PreTrainedModel:
    config = transformers.T5Config(
        vocab_size=_VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=96, num_layers=2, num_heads=4
    )
    return transformers.T5EncoderModel(config)


def _distilbert() -> PreTrainedModel:
    config = transformers.DistilBertConfig(
        vocab_size=_VOCABULARY, dim=WIDTH, n_layers=2, n_heads=4, hidden_dim=96,
        max_position_embeddings=258,
    )  # fmt: skip
    return transformers.DistilBertModel(config)


def _convbert() -> PreTrainedModel:
    return _of("ConvBert", embedding_size=WIDTH)


def _mobilebert() -> PreTrainedModel:
    return _of("MobileBert", embedding_size=32, intra_bottleneck_size=32, true_hidden_size=32)


def _mistral() -> PreTrainedModel:
    # Wider than every text of the trial at the start.
    return _of("Mistral", _GROUPED | {"max_position_embeddings": 3000}, sliding_window=1000)


def _of(family: str, sizes: Mapping[str, Any] = _SIZES, **options: Any) -> PreTrainedModel:
    config = getattr(transformers, f"{family}Config")(**dict(sizes) | options)
    return getattr(transformers, f"{family}Model")(config)


# How the batches of each family are laid out.
FAMILIES: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "modernbert": (_modernbert, "packed"),
    "embedding-gemma": (_embedding_gemma, "packed"),
    "qwen2-bidirectional": (lambda: _of("Qwen2", _GROUPED, is_causal=False), "packed"),
    "qwen2-causal": (lambda: _of("Qwen2", _GROUPED), "packed"),
    "qwen3-bidirectional": (
        lambda: _of("Qwen3", _GROUPED, is_causal=False, head_dim=16),
        "packed",
    ),
    "mpnet": (lambda: _of("MPNet", pad_token_id=1), "padded"),
    "distilbert": (_distilbert, "packed"),
    "nomic-bert": (lambda: _of("NomicBert"), "packed"),
    "gte": (lambda: _of("Gte"), "packed"),
    "eurobert": (lambda: _of("EuroBert"), "packed"),
    "electra": (lambda: _of("Electra"), "packed"),
    "camembert": (lambda: _of("Camembert", pad_token_id=1), "own"),
    "t5": (_t5, "padded"),
    "mistral": (_mistral, "packed"),
    "convbert": (_convbert, "one_length"),
    "fnet": (lambda: _of("FNet", type_vocab_size=2), "one_length"),
    "mobilebert": (_mobilebert, "one_length"),
    "nystromformer": (lambda: _of("Nystromformer"), "one_length"),
    "bert": (lambda: _of("Bert"), "own"),
    "roberta": (lambda: _of("Roberta", pad_token_id=1), "own"),
}


def save_family(folder: Path, family: str, tokenizer: Tokenizer) -> Path:
    """A checkpoint of the family in `folder`, with a pooling by mean."""
    torch.manual_seed(4)
    make, _ = FAMILIES[family]
    make().save_pretrained(folder)
    spread_weights(folder)
    if family.startswith("qwen"):  # transformers reads these as Qwen's, whatever they say.
        save_byte_level_tokenizer(folder, ("yes", "no"), template_adds_end=True)
    else:
        save_tokenizer(folder, tokenizer)
    return save_modules(folder)


def word_tokenizer() -> Tokenizer:
    """A WordPiece tokenizer that reads capital letters as they are."""
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
    """Save it so that transformers reads it as it is, whatever the family."""
    tokens = dict(
        zip(
            ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"),
            _SPECIAL,
            strict=True,
        )
    )
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

    `pooling` is that of `1_Pooling`; `further` modules have a class, a configuration and a layer.
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
            state = {f"linear.{name}": each for name, each in layer.state_dict().items()}
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
    """A projection of the pooled vector, for `save_modules`."""
    layer = torch.nn.Linear(WIDTH, out_features, bias=bias)
    config = {
        "in_features": WIDTH,
        "out_features": out_features,
        "bias": bias,
        "activation_function": f"torch.nn.modules.activation.{activation}",
    }
    return "Dense", config, layer


def reference(folder: Path) -> SentenceTransformer:
    """sentence-transformers with the same files."""
    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def reference_vectors(folder: Path, texts: list[str], **options: Any) -> np.ndarray:
    """What it makes of the texts, each by itself."""
    model = reference(folder)
    return np.stack([model.encode([text], **options)[0] for text in texts])


def load(folder: Path, target: Target, max_length: int = 8192, **options: Any) -> DenseEmbedder:
    """The dense encoder in `folder`, as the service loads it."""
    model = load_embedder(folder.name, folder, max_length, target, **options)
    assert isinstance(model, DenseEmbedder)
    return model


def embed(model: DenseEmbedder, texts: list[str], prompt: str = "") -> np.ndarray:
    """Its vectors of the texts, computed together."""
    tokenized = model.tokenize(texts, prompt)
    results: list[Any] = model.forward([each.ids for each in tokenized], Outputs(dense=True))
    return np.stack([each.dense for each in results])


def assert_close(ours: Any, theirs: Any) -> None:
    """In float32, but for rounding errors."""
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-5)
