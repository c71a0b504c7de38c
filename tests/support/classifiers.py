"""Saves tiny random token classifiers of several families, each with its own kind of tokenizer."""

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.checkpoints import plain_corpus, save_sentencepiece_tokenizer
from tests.support.wordpiece import MAX_LENGTH, MODERNBERT, ROBERTA, save_model

# The last two have no B- or I-, and end like a label of the outside.
LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC-2", "X-O")
_OTHERS = [
    *("жизнь", "世界", "日本語テキスト", "한국어", "مرحبا", "नमस्ते", "é", "e\u0301", "ﬁ", "ß", "İ"),
    *("😀", "👨\u200d👩\u200d👧", "🇩🇪", "...", "Dr.", "a-b", "12,345.67", "don't", "\u200b"),
    *("[SEP]", "<unk>", "</s>", "\ufffd"),
]
_BETWEEN = (" ", "  ", "", "\n", " \t", "\u00a0")
DEBERTA: dict[str, Any] = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
}


def save_token_classifier(
    folder: Path, kind: str, *, labels: tuple[str, ...] = LABELS, **changes: Any
) -> Path:
    """Save a classifier of tokens of that class of transformers."""
    named: dict[str, Any] = {
        "id2label": dict(enumerate(labels)),
        "label2id": {x: i for i, x in enumerate(labels)},
    }
    model = getattr(transformers, f"{kind}ForTokenClassification")
    return save_model(folder, model, **named, **changes)


def save_families(root: Path) -> dict[str, Path]:
    """Save classifiers of six families: WordPiece, Unigram and byte-level BPE, one with its own."""
    sentencepiece, byte_level = root / "sentencepiece", root / "byte-level"
    sentencepiece.mkdir()
    save_sentencepiece_tokenizer(sentencepiece, plain_corpus(300))
    _save_byte_level_tokenizer(byte_level)
    save = save_token_classifier
    return {
        "bert": save(root / "bert", "Bert"),
        "xlm-roberta": save(
            root / "xlm-roberta", "XLMRoberta", tokenizer_of=sentencepiece, **ROBERTA
        ),
        "roberta": save(root / "roberta", "Roberta", tokenizer_of=byte_level, **ROBERTA),
        "deberta-v2": save(root / "deberta-v2", "DebertaV2", tokenizer_of=sentencepiece, **DEBERTA),
        "modernbert": save(
            root / "modernbert", "ModernBert", tokenizer_of=byte_level, **MODERNBERT
        ),
        "electra": save(root / "electra", "Electra"),
    }


def _save_byte_level_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE with the special tokens of RoBERTa."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(plain_corpus(300), trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        cls_token="<s>",
        sep_token="</s>",
        model_max_length=MAX_LENGTH,
    )
    saved.save_pretrained(folder)


def save_gliner2(
    folder: Path, kind: str = "DebertaV2", *, count_bias: float = 0.0, **changes: Any
) -> Path:
    """Save a span model of the package gliner2, by its own class, on an encoder of that class.

    `count_bias` makes it likelier that the model predicts no span at all.
    """
    from gliner2.configuration import ExtractorConfig  # noqa: PLC0415 - where it is installed
    from gliner2.inference.engine import SpanExtractor  # noqa: PLC0415

    encoder = folder.with_name(f"{folder.name}-encoder")
    save_model(encoder, getattr(transformers, f"{kind}Model"), **changes)
    torch.manual_seed(5)
    model = SpanExtractor(
        ExtractorConfig(model_name="tiny", counting_layer="count_lstm_v2", max_width=4),
        encoder_config=transformers.AutoConfig.from_pretrained(encoder),
        tokenizer=transformers.AutoTokenizer.from_pretrained(encoder),
    )
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if not name.startswith("encoder.") and "norm" not in name:
                # Else all scores are nearly equal.
                tensor.mul_(2.0 if tensor.dim() > 1 else 0.0)
        model.count_pred[-1].bias[0] = count_bias
    model.save_pretrained(folder)
    return folder


def random_texts(count: int, seed: int, most_words: int = 20) -> list[str]:
    """Return texts of words and signs in several scripts, with several kinds of space between."""
    rng, words = random.Random(seed), " ".join(plain_corpus(50)).split()
    texts = ["", " ", "  a"]
    while len(texts) < count:
        chosen = [
            rng.choice(_OTHERS if rng.random() < 0.3 else words)
            for _ in range(rng.randint(1, most_words))
        ]
        texts.append(rng.choice(_BETWEEN).join(chosen))
    return texts
