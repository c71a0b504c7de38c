"""Measure the speed of models that people serve beside bge-m3's, on random weights of their shapes.

    python -m benchmarks.models FOLDER
    python -m benchmarks.models FOLDER --models granite-311m,gte-multilingual --precision bfloat16

Layers, widths, heads and windows are those of the published configurations; the vocabulary and the
tokenizer are bge-m3's for all, so that every model reads the same tokens. The models run in turns,
each in its own process. Checkpoints are saved in FOLDER, with up to 1.3 GB in memory at a time, and
reused.
"""

import argparse
import gc
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel

from benchmarks.adapters import Setting
from benchmarks.checkpoints import VOCABULARY, save_heads, save_modules, save_tokenizer
from benchmarks.worker import Run, measure
from benchmarks.workload import MIXED, QUERIES, draw_texts

_BGE_M3 = "bge-m3"
_GEMMA2_GLOBAL = {"head_dim": 512, "num_key_value_heads": 1}
# What differs from the defaults of transformers for the type.
_SHAPES: dict[str, dict[str, Any]] = {
    _BGE_M3: {
        "model_type": "xlm-roberta", "hidden_size": 1024, "num_hidden_layers": 24,
        "num_attention_heads": 16, "intermediate_size": 4096, "max_position_embeddings": 8194,
        "type_vocab_size": 1,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 3072, "tie_word_embeddings": True,
    },
    "harrier-270m": {
        "model_type": "gemma3_text", "hidden_size": 640, "num_hidden_layers": 18,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "intermediate_size": 2048, "sliding_window": 512,
    },
    "embeddinggemma-2": {
        "model_type": "embedding_gemma2_text", "hidden_size": 512, "num_hidden_layers": 24,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256,
        "intermediate_size": 2048, "hidden_size_per_layer_input": 512, "embedding_dim": 768,
        "sliding_window": 1024, "use_bidirectional_attention": "all",
        "vocab_size_per_layer_input": VOCABULARY,
        "per_layer_config": dict.fromkeys(range(5, 24, 6), _GEMMA2_GLOBAL),
    },
    "granite-311m": {
        "model_type": "modernbert", "hidden_size": 768, "num_hidden_layers": 22,
        "num_attention_heads": 12, "intermediate_size": 1152,
    },
    "gte-multilingual": {
        "model_type": "gte", "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "intermediate_size": 3072,
    },
}  # fmt: skip
_WORKLOADS = {"mixed": draw_texts(MIXED, 48), "queries": draw_texts(QUERIES, 128)}


def save_model(name: str, folder: Path) -> Path:
    """Save a checkpoint of a shape with random weights in bfloat16; one that is there is kept."""
    if not (folder / "config.json").exists():
        shape = dict(_SHAPES[name])
        config = AutoConfig.for_model(shape.pop("model_type"), vocab_size=VOCABULARY, **shape)
        config.pad_token_id, config.bos_token_id, config.eos_token_id = 1, 0, 2
        torch.manual_seed(0)
        save_tokenizer(folder)
        model = AutoModel.from_config(config, dtype=torch.bfloat16)
        _scale_attention(model)
        model.save_pretrained(folder)
        del model
        gc.collect()
        save_modules(folder, int(getattr(config, "embedding_dim", None) or config.hidden_size))
        if name == _BGE_M3:
            save_heads(folder, config.hidden_size)
    return folder


@torch.no_grad()
def _scale_attention(model: Any) -> None:
    """Give attention without a scale scores with a variance of 1, as its trained norms do.

    With the largest score alone in each softmax, the smallest rounding changes all vectors.
    """
    for part in model.modules():
        if getattr(part, "scaling", None) == 1.0:
            for norm in (part.q_norm, part.k_norm):
                norm.weight.fill_(part.head_dim**-0.25)


def main() -> None:
    """Measure the models in turns, and print their speed and memory beside bge-m3's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("folder", type=Path, help="where the checkpoints are saved")
    add("--models", default=",".join(_SHAPES), help="comma-separated (%(default)s)")
    add("--precision", default="bfloat16", help="the number format (%(default)s)")
    add("--rounds", type=int, default=3, help="turns (%(default)s)")
    arguments = parser.parse_args()
    names = list(dict.fromkeys([_BGE_M3, *arguments.models.split(",")]))
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    peaks: dict[str, int] = {}
    texts = [*_WORKLOADS.values()]
    # The first run warms up.
    runs = [Run(batch, Setting()) for batch in (texts[0], *texts)]
    for _ in range(arguments.rounds):
        for name in names:
            folder = save_model(name, arguments.folder.resolve() / name)
            _, encoded = measure(
                Path(sys.executable), "smart_embedder", folder, arguments.precision, runs,
                patience=900,
            )  # fmt: skip
            peaks[name] = max(run.peak_bytes for run in encoded)
            for workload, run in zip(_WORKLOADS, encoded[1:], strict=True):
                seconds[name].setdefault(workload, []).append(sum(run.seconds))
    heads = [f"{workload}, texts/s (bge-m3 = 1)" for workload in _WORKLOADS]
    print(f"| model | {' | '.join(heads)} | peak MiB |")
    for name in names:
        cells = []
        for workload, batch in _WORKLOADS.items():
            median = statistics.median(seconds[name][workload])
            ratio = statistics.median(seconds[_BGE_M3][workload]) / median
            cells.append(f"{len(batch) / median:.1f} ({ratio:.2f})")
        print(f"| {name} | {' | '.join(cells)} | {peaks[name] / 2**20:,.0f} |")


if __name__ == "__main__":
    main()
