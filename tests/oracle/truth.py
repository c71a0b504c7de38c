"""Expected vectors and scores: transformers' modules on the same checkpoints, one text at a time.

The service's forwards, tokenization and truncation are not used. The service's pooling of ColBERT
vectors and MUVERA are applied to these vectors; `test_references` compares those with PyLate and
FastEmbed.
"""

import json
import warnings
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)
from transformers.image_utils import load_image

from smart_embedder.models.heads.dense import DEFAULT_INSTRUCTION
from smart_embedder.models.rerankers.templates import PREFIX, SUFFIX
from smart_embedder.vectors import MuveraSide, muvera_of, pool

Numbers = np.ndarray
_PROMPTS = "config_sentence_transformers.json"


class RefusedError(Exception):
    """The service must refuse the request."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture in place of a text: a data URL, or its base64 alone."""

    content: str


@dataclass(frozen=True, slots=True)
class ReadingOptions:
    """How a text is read: its prompt, and its truncation."""

    prompt: str = ""
    truncate: bool = True
    side: str = "right"
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Ids:
    """The tokens of a text that a model reads; `original` counts them before truncation."""

    read: list[int]
    original: int
    limit: int


class Checkpoint:
    """A folder's tokenizer and weights, in float32."""

    def __init__(self, folder: Path, kind: Any, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.model = kind.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @property
    def name(self) -> str:
        return self.folder.name

    def id_of(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        assert found is not None
        return found

    def plain(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def read(
        self, text: str | Picture, frame: tuple[list[int], list[int]], options: ReadingOptions
    ) -> Ids:
        """Tokenize a text behind its prompt, which a cut of the beginning keeps."""
        if isinstance(text, Picture):
            raise RefusedError
        found = self.tokenizer.encode(options.prompt + text, add_special_tokens=False)
        end = len(options.prompt.rstrip())
        kept_first = sum(start < end for start, _ in found.offsets)
        return self.cut(found.ids, frame, options, kept_first)

    def cut(
        self,
        ids: list[int],
        frame: tuple[list[int], list[int]],
        options: ReadingOptions,
        kept_first: int = 0,
    ) -> Ids:
        """Cut the tokens to the limit; the first `kept_first` are never cut."""
        before, after = frame
        room = self.limit - len(before) - len(after)
        room = room if options.most is None else min(room, options.most)
        if len(ids) > room and not options.truncate:
            raise RefusedError
        first = room if options.side == "right" else kept_first
        kept = ids if len(ids) <= room else [*ids[:first], *ids[len(ids) - room + first :]]
        framed = len(before) + len(after)
        return Ids([*before, *kept, *after], len(ids) + framed, room + framed)

    def output(self, ids: list[int]) -> Any:
        with torch.inference_mode():
            return self.model(input_ids=torch.tensor([ids]))


@dataclass(frozen=True, slots=True)
class Vectors:
    """The vectors of one text."""

    ids: Ids
    dense: Numbers
    raw: Numbers
    sparse: dict[int, float] = field(default_factory=dict)
    colbert: Numbers = field(default_factory=lambda: np.empty((0, 0)))
    colbert_ids: tuple[int, ...] = ()


class M3(Checkpoint):
    """bge-m3: XLM-RoBERTa, and a linear layer for sparse and for ColBERT vectors."""

    kinds = ("dense", "sparse", "colbert")
    begin: ClassVar[list[int]] = [0]
    end: ClassVar[list[int]] = [2]
    special = (0, 1, 2, 3)

    def __init__(self, folder: Path, limit: int) -> None:
        super().__init__(folder, AutoModel, limit)
        configured = folder / _PROMPTS
        self.prompts: dict[str, str] = (
            json.loads(configured.read_text("utf-8"))["prompts"] if configured.exists() else {}
        )
        self._heads = {
            kind: torch.load(folder / f"{kind}_linear.pt") for kind in ("sparse", "colbert")
        }
        # A text is read in several ways, many times in each.
        self.vectors = lru_cache(1000)(self._vectors)

    def _head(self, kind: str, states: torch.Tensor) -> torch.Tensor:
        weights = {name: weight.float() for name, weight in self._heads[kind].items()}
        return torch.nn.functional.linear(states, weights["weight"], weights["bias"])

    def _vectors(self, text: str | Picture, options: ReadingOptions) -> Vectors:
        ids = self.read(text, (self.begin, self.end), options)
        states = self.output(ids.read).last_hidden_state[0]
        weights = self._head("sparse", states).relu()[:, 0].tolist()
        sparse: dict[int, float] = {}
        for token, weight in zip(ids.read, weights, strict=True):
            if token not in self.special and weight > sparse.get(token, 0.0):
                sparse[token] = weight
        return Vectors(
            ids,
            unit(states[0].numpy()),
            unit(states[0].numpy()),
            sparse,
            unit(self._head("colbert", states[1:]).numpy()),
            tuple(ids.read[1:]),
        )


class Qwen(Checkpoint):
    """Qwen3-Embedding: the state of the last token."""

    # The prompts of the model card, for a folder without modules.
    begin: ClassVar[list[int]] = []
    prompts: ClassVar[dict[str, str]] = {
        "query": f"Instruct: {DEFAULT_INSTRUCTION}\nQuery:",
        "document": "",
    }

    def __init__(self, folder: Path, limit: int) -> None:
        super().__init__(folder, AutoModel, limit)
        self.end: list[int] = [self.id_of("<|endoftext|>")]
        self.vectors = lru_cache(1000)(self._vectors)

    def _vectors(self, text: str | Picture, options: ReadingOptions) -> Vectors:
        ids = self.read(text, (self.begin, self.end), options)
        states = self.output(ids.read).last_hidden_state[0].numpy()
        return Vectors(ids, unit(states[-1]), states[-1])


class Clip(Checkpoint):
    """CLIP: one vector of a text or a picture, which counts as its patches and one token."""

    kinds = ("dense",)
    prompts: ClassVar[dict[str, str]] = {}
    begin: ClassVar[list[int]] = [2]
    end: ClassVar[list[int]] = [3]

    def __init__(self, folder: Path, limit: int) -> None:
        super().__init__(folder, AutoModel, limit)
        self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.vectors = lru_cache(1000)(self._vectors)

    @torch.inference_mode()
    def _vectors(self, item: str | Picture, options: ReadingOptions) -> Vectors:
        if isinstance(item, Picture):
            try:
                picture = load_image(item.content)
            except ValueError as error:
                raise RefusedError from error
            about = self.model.config.vision_config
            count = (about.image_size // about.patch_size) ** 2 + 1
            ids = Ids([0] * count, count, count)
            arrays = self._processor(images=picture, return_tensors="pt")
            found = self.model.get_image_features(**arrays)
        else:
            ids = self.read(item, (self.begin, self.end), options)
            found = self.model.get_text_features(input_ids=torch.tensor([ids.read]))
        vector = found.pooler_output[0].numpy()
        return Vectors(ids, unit(vector), vector)


class BgeReranker(Checkpoint):
    """A cross-encoder with one label."""

    def __init__(self, folder: Path, limit: int) -> None:
        super().__init__(folder, AutoModelForSequenceClassification, limit)

    def logit(
        self, query: str, passage: str, options: ReadingOptions, _: str | None
    ) -> tuple[float, Ids]:
        """Return the logit, and the tokens of the pair."""
        ids = self.cut(self.plain(passage), ([0, *self.plain(query), 2, 2], [2]), options)
        return self.output(ids.read).logits[0, 0].item(), ids


class QwenReranker(Checkpoint):
    """Qwen3-Reranker: a causal model answers yes or no."""

    def __init__(self, folder: Path, limit: int) -> None:
        super().__init__(folder, AutoModelForCausalLM, limit)
        self._answers = [self.id_of(word) for word in ("yes", "no")]

    def logit(
        self, query: str, passage: str, options: ReadingOptions, instruction: str | None
    ) -> tuple[float, Ids]:
        """Return the log odds of yes, and the tokens of the prompt."""
        task = DEFAULT_INSTRUCTION if instruction is None else instruction
        head = self.plain(f"<Instruct>: {task}\n<Query>: {query}\n<Document>:")
        frame = ([*self.plain(PREFIX), *head], self.plain(SUFFIX))
        ids = self.cut(self.plain(f" {passage}"), frame, options)
        yes, no = self.output(ids.read).logits[0, -1, self._answers].double().tolist()
        return yes - no, ids


def unit(vectors: Numbers) -> Numbers:
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12))


def sigmoid(value: float) -> float:
    return float(1 / (1 + np.exp(-value)))


def quantized(vectors: Numbers, dtype: str) -> tuple[Numbers, Numbers | None]:
    if dtype in {"int8", "uint8"}:
        largest = np.maximum(np.abs(vectors).max(axis=-1, keepdims=True), 1e-12)
        values = np.rint(vectors / largest * 127).astype(int) + (128 if dtype == "uint8" else 0)
        return values, largest[..., 0] / 127
    if dtype in {"binary", "ubinary"}:
        bits = np.packbits(vectors > 0, axis=-1).astype(np.int64)
        return bits - (128 if dtype == "binary" else 0), None
    if dtype in {"float16", "bfloat16"}:
        return torch.tensor(vectors).to(getattr(torch, dtype)).float().numpy(), None
    if dtype == "float32":
        return vectors, None
    raise KeyError(dtype)


def pooled(vectors: Numbers, factor: int | None) -> Numbers:
    return vectors if factor is None else pool(vectors.astype(np.float32), factor)


def muvera(vectors: Numbers, side: MuveraSide) -> Numbers:
    return muvera_of(vectors.shape[1]).encode(vectors.astype(np.float32), side)


def fused(
    query: Vectors, passage: Vectors, weights: dict[str, float]
) -> tuple[float, dict[str, float]]:
    """Return the score of late interaction: the weighted mean of scores by kind, and these."""
    parts = {"dense": float(query.dense @ passage.dense)}
    if "sparse" in weights:
        weighed = passage.sparse.items()
        parts["sparse"] = sum(query.sparse.get(token, 0.0) * weight for token, weight in weighed)
        parts["colbert"] = float((query.colbert @ passage.colbert.T).max(axis=1).mean())
    total = sum(weights.values())
    return sum(weights[kind] * part for kind, part in parts.items()) / total, parts


class Classifier:
    """A classifier of tokens, by transformers' pipeline."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pipeline = transformers.pipeline("token-classification", str(folder), device="cpu")

    def labels(self, aggregation: str) -> set[str]:
        """Return the labels that spans may have."""
        names = self._pipeline.model.config.id2label.values()
        found = {name if aggregation == "none" else name.split("-", 1)[-1] for name in names}
        return found - {"O"}

    def spans(self, text: str, aggregation: str) -> list[dict[str, Any]]:
        """Find the spans of a text that is not longer than the model reads."""
        key = "entity" if aggregation == "none" else "entity_group"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = self._pipeline(text, aggregation_strategy=aggregation)
        return [
            {"start": span["start"], "end": span["end"], "label": span[key], "score": span["score"]}
            for span in found
        ]

    def count_tokens(self, text: str) -> int:
        """Return the tokens of a text, with special ones."""
        return len(self._pipeline.tokenizer(text)["input_ids"])
