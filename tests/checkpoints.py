"""Tiny random checkpoints of the true architectures, with tokenizers trained on the spot."""

import random
import tempfile
from pathlib import Path

import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from transformers import XLMRobertaTokenizer

from benchmarks.checkpoints import Shape, save_encoder, save_heads

WORDS = [
    "search",
    "hybrid",
    "vector",
    "lexical",
    "dense",
    "sparse",
    "token",
    "weight",
    "rank",
    "query",
    "passage",
    "model",
    "memory",
    "sea",
    "mountain",
    "river",
    "bread",
    "kitchen",
    "music",
    "physics",
    "history",
    "language",
    "winter",
    "garden",
    "train",
    "doctor",
    "suche",
    "gewicht",
    "rivière",
    "montaña",
    "жизнь",
    "слово",
    "检索",
    "向量",
    "世界",
    "検索",
    "言葉",
    "مرحبا",
    "بحث",
    "שלום",
    "חיפוש",
    "naïve",
]


def corpus(lines: int = 2000, seed: int = 0) -> list[str]:
    """Sentences from a small vocabulary in several scripts, with made-up words between."""
    rng = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    coined = ["".join(rng.choices(syllables, k=rng.randint(2, 4))) for _ in range(300)]
    return [" ".join(rng.choices(WORDS + coined, k=rng.randint(3, 20))) for _ in range(lines)]


def save_sentencepiece_tokenizer(folder: Path) -> XLMRobertaTokenizer:
    """Train a unigram SentencePiece model and save it as an XLM-RoBERTa tokenizer."""
    with tempfile.TemporaryDirectory() as scratch:
        prefix = str(Path(scratch) / "spm")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus()),
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
    tokenizer = save_sentencepiece_tokenizer(folder)
    shape = Shape(hidden=64, layers=layers, heads=4, inner=128)
    save_encoder(folder, shape, vocabulary=len(tokenizer))
    spread_weights(folder)
    save_heads(folder, shape.hidden)
    return folder


def spread_weights(folder: Path) -> None:
    """Random weights of the usual 0.02 spread barely tell texts apart; these do."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    noisy = {name: tensor + torch.randn_like(tensor) * 0.08 for name, tensor in weights.items()}
    save_file(noisy, path, metadata={"format": "pt"})
