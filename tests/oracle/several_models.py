"""Draws requests for a server with several models, with the options of the named model."""

import random
from pathlib import Path

from transformers import BertForMaskedLM, BertModel

from tests.oracle.cases import KINDS, Body, Case
from tests.support.checkpoints import WORDS
from tests.support.encoders import save_family, word_tokenizer
from tests.support.wordpiece import save_colbert, save_splade

# The kinds of vectors that a model makes; None stands for the default model, as bge-m3.
MODELS: dict[str | None, tuple[str, ...]] = {
    None: KINDS,
    "bert": ("dense",),
    "splade": ("sparse",),
    "colbert": ("colbert",),
}
_LENGTHS = (1, 3, 8, 20, 60, 150)
_TEXTS = (1, 1, 1, 2, 4, 16)
_DISTINCT_TEXTS = 40


def save_several(folder: Path) -> Path:
    """Save the checkpoints, and the file for MODELS that names them."""
    (folder / "bert").mkdir(parents=True)
    save_family(folder / "bert", "bert", word_tokenizer())
    save_splade(folder / "splade", BertForMaskedLM)
    save_colbert(folder / "colbert", BertModel)
    path = folder / "models.yaml"
    path.write_text("".join(f"- name: {folder / name}\n" for name in MODELS if name), "utf-8")
    return path


def draw_several(seed: int, count: int) -> list[Case]:
    """Draw `count` requests, many of which share texts, for the cache."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.choice(_LENGTHS))) for _ in range(_DISTINCT_TEXTS)]
    return [
        Case(number, "/rerank", _draw_rerank(rng, texts))
        if number % 6 == 5
        else Case(number, "/embeddings/", _draw_embed(rng, texts))
        for number in range(count)
    ]


def _draw_rerank(rng: random.Random, texts: list[str]) -> Body:
    return {"query": rng.choice(texts), "passages": rng.sample(texts, rng.choice((1, 2, 12)))}


def _draw_embed(rng: random.Random, texts: list[str]) -> Body:
    model = rng.choice([*MODELS])
    kinds = MODELS[model]
    requested = rng.sample(kinds, rng.randint(1, len(kinds)))
    body: Body = {f"return_{kind}": kind in requested for kind in KINDS}
    body["sentences"] = rng.choices(texts, k=rng.choice(_TEXTS))
    if model is not None:
        body["model"] = model
    return body | _draw_options(rng, model, requested)


def _draw_options(rng: random.Random, model: str | None, requested: list[str]) -> Body:
    options: Body = {}
    if "dense" in requested or "colbert" in requested:
        options["output_dtype"] = rng.choice(("float32", "float32", "int8", "uint8"))
    if "dense" in requested:
        options["normalize_dense"] = rng.random() < 0.5
    if "colbert" in requested and rng.random() < 0.3:
        options["colbert_pool_factor"] = rng.choice((2, 3))
    elif requested != ["dense"]:
        options["return_tokens"] = rng.random() < 0.3
        options["sparse_as_indices"] = rng.random() < 0.5 and "sparse" in requested
    if model == "colbert":
        kinds = ("document",) if "colbert_pool_factor" in options else ("query", "document")
        options["input_type"] = rng.choice(kinds)
    return options
