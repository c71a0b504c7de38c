"""The servers that the oracle tests: their models, and the options of rerank requests."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.oracle.cases import KINDS, MALFORMED, Body, Case, Malformed, draw_cases
from tests.oracle.pictures import MALFORMED_PICTURES, draw_pictures, save_pictures
from tests.oracle.rules import INSTRUCTION, Served
from tests.oracle.several_models import draw_several, save_several
from tests.oracle.truth import M3, BgeReranker, Classifier, Clip, Qwen, QwenReranker
from tests.support.checkpoints import save_m3, save_qwen, save_reranker
from tests.support.classifiers import save_token_classifier
from tests.support.pictures import POSITIONS, save_image_text


@dataclass(frozen=True, slots=True)
class Configuration:
    """The settings of a server, and the function that draws requests from a seed and a count.

    `only_under_load` are settings of the server under load; the idle server lacks them.
    """

    settings: dict[str, str]
    draw_cases: Callable[[int, int], list[Case]]
    only_under_load: dict[str, str] = field(default_factory=dict)
    malformed: Sequence[Malformed] = MALFORMED


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Folders of tiny checkpoints of every architecture; `several` is a file for MODELS.

    `pictures` has three models, and such a file.
    """

    m3: Path
    reranker: Path
    qwen: Path
    several: Path
    pictures: Path


def save_checkpoints(folder: Path) -> Checkpoints:
    return Checkpoints(
        save_m3(folder / "m3"),
        save_reranker(folder / "reranker"),
        save_qwen(folder / "qwen"),
        save_several(folder / "several"),
        save_pictures(folder / "pictures"),
    )


def configurations(checkpoints: Checkpoints) -> dict[str, Configuration]:
    """Return the servers by name; some limits cut the longest texts, to compare warnings."""
    m3, qwen = str(checkpoints.m3), str(checkpoints.qwen)
    weights: list[Body] = [
        {"weights": dict(zip(KINDS, values, strict=True))}
        for values in [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0.5, 0.2, 3), (0, 0.3, 1)]
    ]
    return {
        "bge": Configuration(
            {
                "EMBEDDING_MODEL": m3,
                "RERANKER_MODEL": str(checkpoints.reranker),
                "BGE_RERANK_MAX_LENGTH": "512",
            },
            _drawing([{"normalize": False}, {"normalize": True}]),
        ),
        "qwen": Configuration(
            {
                "EMBEDDING_MODEL": m3,
                "DENSE_EMBEDDING_MODEL": qwen,
                "RERANKER_MODEL": qwen,
                "BGE_EMBED_MAX_LENGTH": "1024",
                "QWEN_EMBED_MAX_LENGTH": "1536",
                "QWEN_RERANK_MAX_LENGTH": "1024",
            },
            _drawing(
                [{}, {"normalize": True}, {"instruction": INSTRUCTION}, {"instruction": "?" * 40}],
                words=170,
            ),
        ),
        "late-interaction": Configuration(
            {"EMBEDDING_MODEL": m3, "BGE_EMBED_MAX_LENGTH": "1024"},
            _drawing([{}, *weights]),
        ),
        "several": Configuration(
            {
                "EMBEDDING_MODEL": m3,
                "RERANKER_MODEL": str(checkpoints.reranker),
                "MODELS": str(checkpoints.several),
            },
            draw_several,
            # A cache so small that entries are soon dropped.
            {
                "DEVICE": "cpu:0,cpu:1",
                "EMBEDDING_CACHE_BYTES": "400000",
            },
        ),
        "pictures": Configuration(
            {
                "EMBEDDING_MODEL": str(checkpoints.pictures / "pages"),
                "RERANKER_MODEL": "late-interaction",
                "MODELS": str(checkpoints.pictures / "models.yaml"),
            },
            draw_pictures,
            {"DEVICE": "cpu:0,cpu:1", "EMBEDDING_CACHE_BYTES": "100000"},
            MALFORMED_PICTURES,
        ),
    }


PROMPTS = {"query": "search: ", "document": "passage ", "clustering": "winter "}


def described_servers(
    folder: Path,
) -> dict[str, tuple[dict[str, str], Callable[[], Served]]]:
    """Return the servers for all requests of the description: settings, and expected models.

    The limits are below the longest texts, and the model of bge-m3's kind has prompts.
    """
    m3, reranker = save_m3(folder / "prompted-m3"), save_reranker(folder / "described-reranker")
    qwen, ranking = save_qwen(folder / "dense-qwen"), save_qwen(folder / "ranking-qwen")
    (m3 / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    clip, models = save_image_text(folder / "clip", "clip"), folder / "models.yaml"
    classifier = save_token_classifier(folder / "classifier", "Bert")
    models.write_text(f"- name: {classifier}\n  task: extract\n", "utf-8")
    limits = {"BGE_EMBED_MAX_LENGTH": "32", "BGE_RERANK_MAX_LENGTH": "32"}
    limits |= {"QWEN_EMBED_MAX_LENGTH": "100", "QWEN_RERANK_MAX_LENGTH": "400"}
    settings = limits | {"EMBEDDING_MODEL": str(m3)}
    of_qwen = {"DENSE_EMBEDDING_MODEL": str(qwen), "RERANKER_MODEL": str(ranking)}
    return {
        "bge": (
            settings | {"RERANKER_MODEL": str(reranker)},
            lambda: Served(M3(m3, 32), None, BgeReranker(reranker, 32)),
        ),
        "qwen": (
            settings | of_qwen,
            lambda: Served(M3(m3, 32), Qwen(qwen, 100), QwenReranker(ranking, 400)),
        ),
        "late-interaction": (settings, lambda: Served(M3(m3, 32), None, None)),
        "pictures": (
            {"EMBEDDING_MODEL": str(clip), "MODELS": str(models)},
            lambda: Served(Clip(clip, POSITIONS), None, None, Classifier(classifier)),
        ),
    }


def _drawing(rerank_options: list[Body], words: int = 500) -> Callable[[int, int], list[Case]]:
    return partial(draw_cases, rerank_options=rerank_options, words=words)
