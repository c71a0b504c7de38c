"""Tiny random checkpoints of the true architectures, with tokenizers trained on the spot."""

import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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
    """Sentences of known words alone, each of which a tokenizer may learn as one token."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, 20))) for _ in range(lines)]


def corpus(lines: int = 2000, seed: int = 0) -> list[str]:
    """Sentences from a small vocabulary in several scripts, with made-up words between."""
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
    """A checkpoint of bge-m3's architecture, with its positions and heads, small and random."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = save_sentencepiece_tokenizer(folder, corpus())
    shape = Shape(hidden=64, layers=layers, heads=4, inner=128)
    save_encoder(folder, shape, vocabulary=len(tokenizer))
    spread_weights(folder)
    save_heads(folder, shape.hidden)
    return folder


def save_reranker(folder: Path) -> Path:
    """A checkpoint of bge-reranker-v2-m3's architecture: a classifier with one logit."""
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
    """A checkpoint of Qwen3's architecture, grouped heads and tied embeddings included.

    Its tokenizer closes texts, as Qwen3-Embedding's does; Qwen3-Reranker's template needs none.
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
    """Random weights of the usual 0.02 spread barely tell texts apart; these do."""
    with changed_weights(folder) as weights:
        for tensor in weights.values():
            tensor.add_(torch.randn_like(tensor) * 0.08)


@contextmanager
def changed_weights(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of a checkpoint by their names, which are saved as the block leaves them."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    yield weights
    save_file(weights, path, metadata={"format": "pt"})


@contextmanager
def changed_json(path: Path) -> Iterator[Any]:
    """What a file of JSON holds, which is saved as the block leaves it."""
    content = json.loads(path.read_text("utf-8"))
    yield content
    path.write_text(json.dumps(content), "utf-8")
