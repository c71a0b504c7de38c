"""Rules: compute the expected response of a request, for each schema of a response.

A rule names the fields that hold texts, every option with the values that it covers, and a function
that computes the expected response from `tests.oracle.truth`. Expected values are plain structures:
arrays are compared with a tolerance, and members that are not expected must be `unread` (times and
ids).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.oracle.pictures import PICTURES
from tests.oracle.truth import (
    M3,
    BgeReranker,
    Classifier,
    Clip,
    Ids,
    Picture,
    Qwen,
    QwenReranker,
    ReadingOptions,
    RefusedError,
)
from tests.support.checkpoints import WORDS
from tests.support.formats import JSON

Body = dict[str, Any]
SHORT = ["hybrid search river", "bread", "search search memory слово 世界"]
LONG = [" ".join(WORDS[:40]), "bread"]
# Texts and pictures, for a model that reads both.
MIXED = ["bread", *({"image": url} for url in PICTURES), " ".join(WORDS[:40])]
QUERY, PROMPT, INSTRUCTION = "river search", "mountain: ", "Find the passage that names a river."
BOTH = (True, False)
SIDES = ("left", "right")
# Options that text-embeddings-inference takes together.
TEI_TOGETHER: tuple[Body, ...] = tuple(
    {"truncate": cut, "truncation_direction": side} for cut in BOTH for side in SIDES
)
# Ids of vector spaces of no model.
ELSEWHERE = "dense-a-b-c-d-e-f-g-h, score-a-b-c-d-e-f-g-h"
# More than any model reads.
ALL_TOKENS = 1_000_000
CUTS = (True, False, "NONE", "START", "END")


@dataclass(frozen=True, slots=True)
class Served:
    """The models of a server.

    Without a `dense` model `m3` makes every kind of vectors, and its prompts count. Without a
    `reranker` `m3` scores by late interaction. Without a `classifier` no spans are found. Of a
    server with CLIP, that is the `m3`.
    """

    m3: M3 | Clip
    dense: Qwen | None
    reranker: BgeReranker | QwenReranker | None
    classifier: Classifier | None = None

    @property
    def dense_model(self) -> M3 | Clip | Qwen:
        return self.dense or self.m3

    @property
    def token_model(self) -> M3:
        """The model of sparse and ColBERT vectors; the service refuses these without one."""
        if isinstance(self.m3, Clip):
            raise RefusedError
        return self.m3

    @property
    def ranking_model(self) -> M3 | Clip | BgeReranker | QwenReranker:
        return self.reranker or self.m3

    def prompt(self, name: str | None, model: M3 | Clip | Qwen | None = None) -> str:
        """Return the prompt of that name; the service refuses a name that the model lacks."""
        prompts = (model or self.dense_model).prompts
        if name is None:
            return ""
        if name not in prompts:
            raise RefusedError
        return prompts[name]

    def prompt_for(self, *names: str) -> str:
        """Return the first of these prompts that the model has."""
        prompts = self.dense_model.prompts
        return next((prompts[name] for name in names if name in prompts), "")


@dataclass(frozen=True, slots=True)
class Rule:
    """The requests for one kind of response, and the function that computes it."""

    texts: tuple[str, ...]
    bodies: tuple[Body, ...]
    options: dict[str, tuple[Any, ...]]
    expect: Callable[[Served, Any], Any]
    unread: frozenset[str] = frozenset()
    together: tuple[Body, ...] = ()
    formats: tuple[str, ...] = (JSON,)
    # Whether the model in the path is the reranker.
    of_reranker: bool = False


def is_below_limit(body: Body) -> bool:
    """Whether `truncate_prompt_tokens` is lower than what every model reads."""
    return body.get("truncate_prompt_tokens") not in {None, -1, ALL_TOKENS}


def first(body: Body, *names: str) -> Any:
    return next((body[name] for name in names if body.get(name) is not None), None)


def read_options(body: Body, prompt: str = "") -> ReadingOptions:
    """Read the options of several dialects for truncation."""
    value = first(body, "truncate", "truncation", "truncation_strategy")
    side = first(body, "truncation_side", "truncation_direction")
    side = {"START": "left", "END": "right"}.get(value, side or "right")
    truncate = value not in {False, "NONE"}
    # Only text-embeddings-inference accepts a side without truncation.
    if side == "left" and not truncate and "truncation_direction" not in body:
        raise RefusedError
    most = first(body, "max_tokens", "max_tokens_per_doc", "max_doc_length")
    return ReadingOptions(prompt, truncate, side, most)


def texts_of(found: Any) -> list[Any]:
    """Return the texts and pictures in a text, an object, or a list of these."""
    return [*map(_read_item, found)] if isinstance(found, list) else [_read_item(found)]


def _read_item(item: Any) -> str | Picture:
    match item:
        case str():
            return item
        case {"text": text}:
            return str(text)
        case {"image": content} | {"images": [{"data": content}]} | {"image_url": {"url": content}}:
            return Picture(content)
        case {"content": [part]}:
            return _read_item(part)
    raise TypeError(item)


def shown(item: str | Picture) -> str | None:
    """Return a text as it stands in responses, and None for a picture."""
    return None if isinstance(item, Picture) else item


def usage(count: int) -> Body:
    return {"prompt_tokens": count, "total_tokens": count}


def warning(model: str, name: str, index: int, ids: Ids, side: str) -> Body:
    """Return the warning for a text that was cut, without its message."""
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
