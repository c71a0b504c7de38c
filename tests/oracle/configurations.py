"""The servers that the oracle asks: which models, and which rerank options have an effect there."""

from dataclasses import dataclass
from pathlib import Path

from tests.oracle.cases import KINDS, Body, Case, draw_cases
from tests.support.checkpoints import save_m3, save_qwen, save_reranker

INSTRUCTION = "Find the passage that names a river."


@dataclass(frozen=True, slots=True)
class Configuration:
    """A server's settings, the rerank options to combine, and the words of a request."""

    settings: dict[str, str]
    rerank_options: list[Body]
    words: int = 500

    def draw_cases(self, seed: int, count: int) -> list[Case]:
        """Requests for such a server."""
        return draw_cases(seed, count, self.rerank_options, self.words)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Folders of tiny checkpoints, one of each architecture."""

    m3: Path
    reranker: Path
    qwen: Path


def save_checkpoints(folder: Path) -> Checkpoints:
    """Make all three."""
    return Checkpoints(
        save_m3(folder / "m3"), save_reranker(folder / "reranker"), save_qwen(folder / "qwen")
    )


def configurations(checkpoints: Checkpoints) -> dict[str, Configuration]:
    """By name. Some limits are below the longest texts, so that there are warnings to compare."""
    m3, qwen = str(checkpoints.m3), str(checkpoints.qwen)
    weights: list[Body] = [
        {"weights": dict(zip(KINDS, each, strict=True))}
        for each in [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0.5, 0.2, 3), (0, 0.3, 1)]
    ]
    return {
        "bge": Configuration(
            {
                "EMBEDDING_MODEL": m3,
                "RERANKER_MODEL": str(checkpoints.reranker),
                "BGE_RERANK_MAX_LENGTH": "512",
            },
            [{"normalize": False}, {"normalize": True}],
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
            [{}, {"normalize": True}, {"instruction": INSTRUCTION}, {"instruction": "?" * 40}],
            words=170,
        ),
        "late-interaction": Configuration(
            {"EMBEDDING_MODEL": m3, "BGE_EMBED_MAX_LENGTH": "1024"},
            [{}, *weights],
        ),
    }
