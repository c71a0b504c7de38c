"""Checkpoints of real shapes with random weights: speed does not depend on the values.

    python -m benchmarks.checkpoints NAME FOLDER

`MAKERS` has the names: bge-m3 takes 2.2 GiB; two-layer has its architecture with a width of 64 and
two layers. Weights are in float32.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    PreTrainedTokenizerFast,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from benchmark import WORDS
from benchmarks.workload import SYLLABLES


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of an XLM-RoBERTa encoder."""

    hidden: int
    layers: int
    heads: int
    inner: int


_LARGE = Shape(hidden=1024, layers=24, heads=16, inner=4096)
_SMALL = Shape(hidden=64, layers=2, heads=4, inner=256)
VOCABULARY = 250_002


def save_bge_m3(folder: Path, shape: Shape = _LARGE) -> Path:
    """Save a checkpoint that all engines for bge-m3 can read: weights, heads and tokenizer."""
    save_tokenizer(folder)
    save_encoder(folder, shape, vocabulary=VOCABULARY)
    save_heads(folder, shape.hidden)
    save_modules(folder, shape.hidden)
    return folder


def save_two_layers(folder: Path) -> Path:
    """Save a small checkpoint of bge-m3's architecture."""
    return save_bge_m3(folder, _SMALL)


def save_modules(folder: Path, width: int) -> None:
    """Save sentence-transformers' configuration: the first token's state, normalised."""
    parts = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(parts.items())
    ]
    pooling = {
        "word_embedding_dimension": width,
        "pooling_mode_cls_token": True,
        "pooling_mode_mean_tokens": False,
    }
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "2_Normalize").mkdir(exist_ok=True)
    _save_json(folder / "modules.json", modules)
    _save_json(folder / "1_Pooling" / "config.json", pooling)
    _save_json(folder / "sentence_bert_config.json", {"max_seq_length": 8192})


def save_encoder(folder: Path, shape: Shape, *, vocabulary: int, labels: int = 0) -> None:
    """Save XLM-RoBERTa with bge-m3's positions and random weights, as safetensors in float32.

    With `labels` it is a classifier.
    """
    torch.manual_seed(labels)
    config = XLMRobertaConfig(
        vocab_size=vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.inner,
        max_position_embeddings=8194,
        type_vocab_size=1,
        pad_token_id=1,
        layer_norm_eps=1e-5,
    )
    if labels:
        config.num_labels = labels
        XLMRobertaForSequenceClassification(config).save_pretrained(folder)
    else:
        XLMRobertaModel(config, add_pooling_layer=False).save_pretrained(folder)


def save_heads(folder: Path, hidden: int) -> None:
    """Save random sparse and ColBERT heads in bge-m3's files."""
    for name, width in (("sparse_linear.pt", 1), ("colbert_linear.pt", hidden)):
        torch.save(torch.nn.Linear(hidden, width).state_dict(), folder / name)


def _save_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def make_tokenizer() -> Tokenizer:
    """Make a unigram tokenizer of bge-m3's size from benchmark.py's words and random words."""
    known = sorted({*WORDS})
    letters = [chr(code) for code in range(33, 127)]
    parts = ["<s>", "<pad>", "</s>", "<unk>", "▁", *letters, *SYLLABLES]
    all_coined = map("".join, itertools.product(SYLLABLES, repeat=3))
    coined = itertools.islice(all_coined, VOCABULARY - len(parts) - len(known) - 1)
    # A word as one piece is always more likely than its parts.
    pieces = [*((part, -20.0) for part in parts), *((f"▁{w}", -1.0) for w in (*known, *coined))]
    tokenizer = Tokenizer(models.Unigram([*pieces, ("<mask>", 0.0)], unk_id=3, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Save the tokenizer of `make_tokenizer` with bge-m3's template; create the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        mask_token="<mask>",
    ).save_pretrained(folder)
    # The class name that transformers 4 and 5 both know: some peers need 4.
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    _save_json(file, config | {"tokenizer_class": "PreTrainedTokenizerFast"})


MAKERS: dict[str, Callable[[Path], Path]] = {
    "bge-m3": save_bge_m3,
    "two-layer": save_two_layers,
}


def main() -> None:
    """Save the checkpoint that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=MAKERS, help="the architecture")
    parser.add_argument("folder", type=Path, help="the folder that is written")
    arguments = parser.parse_args()
    print(MAKERS[arguments.name](arguments.folder))


if __name__ == "__main__":
    main()
