"""The rules of the truth: for each schema of an answer, what it must hold.

A rule names the fields that hold texts, every option with the values whose effect it knows, and a
function that makes the expected answer of a request from `tests.oracle.truth`. Expected values are
plain structures: an array stands for numbers with a tolerance, and what is not expected must be one
of the rule's `unread` fields (times and ids).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.oracle.truth import M3, BgeReranker, Ids, Qwen, QwenReranker, Reading, RefusedError
from tests.support.checkpoints import WORDS
from tests.support.formats import JSON

Body = dict[str, Any]
SHORT = ["hybrid search river", "bread", "search search memory слово 世界"]
LONG = [" ".join(WORDS[:40]), "bread"]
QUERY, PROMPT, INSTRUCTION = "river search", "mountain: ", "Find the passage that names a river."
BOTH = (True, False)
SIDES = ("left", "right")
# What text-embeddings-inference takes together.
TEI_TOGETHER: tuple[Body, ...] = tuple(
    {"truncate": True, "truncation_direction": side} for side in SIDES
)
# What has the form of a space's id, and is that of no model.
ELSEWHERE = "dense-a-b-c-d-e-f-g-h, score-a-b-c-d-e-f-g-h"
CUTS = (True, False, "NONE", "START", "END")


@dataclass(frozen=True, slots=True)
class Served:
    """The models of a server; without a `dense` one, `m3` makes every kind, with its prompts.

    Without a `reranker`, `m3` scores by late interaction.
    """

    m3: M3
    dense: Qwen | None
    reranker: BgeReranker | QwenReranker | None

    @property
    def dense_model(self) -> M3 | Qwen:
        return self.dense or self.m3

    @property
    def ranking_model(self) -> M3 | BgeReranker | QwenReranker:
        return self.reranker or self.m3

    def prompt(self, name: str | None, model: M3 | Qwen | None = None) -> str:
        """That of a name; a name that the model has no prompt of is an error."""
        prompts = (model or self.dense_model).prompts
        if name is None:
            return ""
        if name not in prompts:
            raise RefusedError
        return prompts[name]

    def prompt_for(self, *names: str) -> str:
        """The first that the model has."""
        prompts = self.dense_model.prompts
        return next((prompts[name] for name in names if name in prompts), "")


@dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of answer is asked for and known."""

    texts: tuple[str, ...]
    bodies: tuple[Body, ...]
    options: dict[str, tuple[Any, ...]]
    expect: Callable[[Served, Any], Any]
    unread: frozenset[str] = frozenset()
    together: tuple[Body, ...] = ()
    formats: tuple[str, ...] = (JSON,)
    # Which model stands in the path, where one does.
    of_reranker: bool = False


def first(body: Body, *names: str) -> Any:
    return next((body[name] for name in names if body.get(name) is not None), None)


def reading(body: Body, prompt: str = "", *, cut: bool = True) -> Reading:
    """The options of several dialects for how texts are cut."""
    how = first(body, "truncate", "truncation", "truncation_strategy")
    side = first(body, "truncation_side", "truncation_direction")
    side = {"START": "left", "END": "right"}.get(how, side or "right")
    truncate = cut if how is None else how not in {False, "NONE"}
    # Elsewhere than in text-embeddings-inference an option without effect is an error.
    if side == "left" and not truncate and cut:
        raise RefusedError
    most = first(body, "max_tokens", "max_tokens_per_doc", "max_doc_length")
    return Reading(prompt, truncate, side, most)


def texts_of(found: Any) -> list[str]:
    """Of a text, an object or a list of them."""
    found = found if isinstance(found, list) else [found]
    return [each["text"] if isinstance(each, dict) else each for each in found]


def usage(count: int) -> Body:
    return {"prompt_tokens": count, "total_tokens": count}


def warning(model: str, name: str, index: int, ids: Ids, side: str) -> Body:
    """What is told of a text that was cut, without the sentence."""
    return {
        "code": "input_truncated",
        "severity": "warning",
        "target": {"field": name, "index": index, "pointer": f"/{name}/{index}"},
        "details": {
            "model": model,
            "max_tokens": ids.limit,
            "original_tokens": ids.original,
            "truncated_tokens": ids.original - ids.limit,
            "truncation_side": {"left": "start", "right": "end"}[side],
        },
    }
