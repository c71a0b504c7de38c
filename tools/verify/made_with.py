"""Find the settings with which the configured model makes the vectors of another server.

The other server's texts and vectors come from a JSON Lines file or a Qdrant collection. The model
of the settings embeds the texts in float32. If its vectors differ, the shortest texts are embedded
with other prompts, special tokens and poolings, and then long texts with other length limits.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import torch

from app.logs import escape_text
from app.settings import load_settings
from smart_embedder.errors import StartupError
from smart_embedder.hardware.device import choose_device
from smart_embedder.kernels.target import Target, choose_backend
from smart_embedder.models.families.registry import is_qwen3, load_backbone
from smart_embedder.models.files.config import POOLINGS, TextOptions, transformer_folder
from smart_embedder.models.heads.embedder import EmbeddingModel
from smart_embedder.models.heads.pooling import SentenceConfig, normalize, pool
from smart_embedder.models.loader import load_embedder, locate_models, read_overrides
from smart_embedder.models.tokenizer import TextTokenizer
from smart_embedder.requests import Outputs, Side, TruncationOptions
from smart_embedder.results import FloatArray
from smart_embedder.settings import EngineSettings
from tools.verify.canaries import TOLERANCES
from tools.verify.space import CannotCompareError

_MAX_TEXTS = 100
# Texts of fewer characters are hardly ever truncated; a few are used if all are longer.
_SHORT, _FEW = 200, 8
_NAMES = ("vector", "embedding", "dense", "dense_vector")
# The prompts of widely used models, tried besides those of the configuration.
_PROMPTS = ("query: ", "passage: ", "search_query: ", "search_document: ")
_LENGTHS = (64, 128, 256, 384, 512, 1024, 2048, 4096)
_LENGTH_TOLERANCE = 0.01
# Other settings explain the vectors if the largest distance is this many times smaller.
_CLEARLY = 4


@dataclass(frozen=True, slots=True)
class Stored:
    """A text, and the vector that the other server made of it."""

    text: str
    vector: FloatArray


@dataclass(frozen=True, slots=True)
class Reading:
    """How a text becomes a vector: the options in which servers differ, besides the model."""

    prompt: str = ""
    lower_case: bool = False
    without_end: bool = False
    pooling: str = "cls"
    length: int | None = None
    side: Side = "right"

    def describe(self, usual: "Reading", length_setting: str) -> str:
        """Name the settings, and the request's options, that differ from the usual reading."""
        found = []
        if self.prompt != usual.prompt:
            found.append(f'the prompt {json.dumps(self.prompt, ensure_ascii=False)} ("prompt" in '
                         "requests, or DOCUMENT_PROMPT and QUERY_PROMPT)")  # fmt: skip
        if self.pooling != usual.pooling:
            found.append(f"POOLING={self.pooling}")
        if self.lower_case != usual.lower_case:
            found.append('"do_lower_case": true in sentence_bert_config.json')
        if self.without_end:
            found.append("texts without the special token at their end, which no setting makes")
        if self.length is not None:
            found.append(f"{length_setting}={self.length}")
        if self.side != usual.side:
            found.append(f'"truncation_side": "{self.side}" in requests')
        return " and ".join(found)


def check_made_with(source: str, text_field: str, vector_name: str | None) -> int:
    """Compare, print a verdict, and return the exit status: 0 if the vectors are the same."""
    stored = read_stored(source, text_field, vector_name)
    try:
        return _compare(stored, _Model(load_settings()))
    except StartupError as error:
        raise CannotCompareError(str(error)) from error


def _compare(stored: Sequence[Stored], model: "_Model") -> int:
    width, ours = len(stored[0].vector), model.width
    if width > ours:
        raise CannotCompareError(
            f"the vectors have {width} numbers, and those of {model.name} have {ours}: they are "
            "of another model"
        )
    ours_as_served = model.embed_as_served([item.text for item in stored])
    remarks = _describe_shape(stored, ours_as_served)
    distances = _distances(stored, ours_as_served)
    present = float(distances.max())
    if present > TOLERANCES["float16"]:
        reading, tried = model.find_reading(stored)
        by_reading = model.embed(stored, reading)
        found = _distances(stored, by_reading)
        settings_found = reading.describe(model.usual, model.length_setting)
        if settings_found and found.max() <= min(present / _CLEARLY, TOLERANCES["int8"]):
            print(f"With the present settings of {model.name}, {_describe(distances)}.")
            remarks = _describe_shape(stored, by_reading)
            print(f"They are made with {settings_found}: {_describe(found)}{remarks}.")
            return 1
        if present > TOLERANCES["int8"]:
            print(
                f"None of {tried} combinations of pooling, prompt, special tokens and length makes "
                f"these vectors with {model.name}. The nearest is "
                f"{settings_found or 'that of the present settings'}: {_describe(found)}. They may "
                "be of another model or revision."
            )
            return 1
    verdict = "agree in direction with" if remarks else "may be mixed with"
    print(f"The vectors {verdict} those of {model.name}: {_describe(distances)}{remarks}.")
    return 1 if remarks else 0


def read_stored(source: str, text_field: str, vector_name: str | None) -> list[Stored]:
    """Read at most 100 texts with their vectors; raise `CannotCompareError` if there are none."""
    read = _read_collection if source.startswith(("http://", "https://")) else _read_lines
    stored: list[Stored] = []
    for row, vectors in itertools.islice(read(source), _MAX_TEXTS):
        text = row.get(text_field)
        vector = vectors.get(vector_name) if vector_name else _only_vector(vectors)
        if isinstance(text, str) and isinstance(vector, list):
            stored.append(Stored(text, np.array(vector, np.float32)))
    if not stored:
        raise CannotCompareError(
            f"{source} has no texts in {text_field!r} with a vector"
            f"{f' named {vector_name!r}' if vector_name else ''}: see --text-field, --vector-name"
        )
    if len({len(item.vector) for item in stored}) > 1:
        raise CannotCompareError(f"{source} has vectors of several widths")
    return stored


def _only_vector(vectors: Mapping[str, Any]) -> Any:
    """Return the dense vector if there is one, or the first of the usual names."""
    dense = {name: vector for name, vector in vectors.items() if isinstance(vector, list)}
    names = [*filter(dense.__contains__, _NAMES), *(dense if len(dense) == 1 else ())]
    return dense[names[0]] if names else None


def _read_lines(path: str) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    try:
        with Path(path).open(encoding="utf-8") as lines:
            for line in filter(str.strip, lines):
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise CannotCompareError(f"{path} has a line that is not a JSON object")
                yield row, row
    except (OSError, ValueError) as error:
        raise CannotCompareError(f"{path} cannot be read: {error}") from error


def _read_collection(url: str) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    body = {"limit": _MAX_TEXTS, "with_payload": True, "with_vector": True}
    try:
        answer = httpx2.post(f"{url.rstrip('/')}/points/scroll", json=body, timeout=60)
        answer.raise_for_status()
        points = answer.json()["result"]["points"]
    except (httpx2.HTTPError, LookupError, TypeError, ValueError) as error:
        reason = escape_text(str(error), 500)
        raise CannotCompareError(
            f"{url} is not a collection such as http://localhost:6333/collections/docs: {reason}"
        ) from error
    for point in points:
        vector = point.get("vector")
        yield point.get("payload") or {}, vector if isinstance(vector, dict) else {"": vector}


class _Model:
    """The dense model of the settings, in float32, and its other readings of a text."""

    def __init__(self, settings: EngineSettings) -> None:
        """Load the model as it is served; raises `StartupError`."""
        entries, folders = settings.default_entries, locate_models(settings)
        entry, folder = entries.dense or entries.embedder, folders.dense or folders.embedding
        device = choose_device(settings.devices[0])
        self._target = Target(device, torch.float32, choose_backend(device, torch.float32))
        self._folder, self.name = folder, entry.public_name
        self._transformer = transformer_folder(folder)
        is_decoder = is_qwen3(folder)
        self.length_setting = "QWEN_EMBED_MAX_LENGTH" if is_decoder else "BGE_EMBED_MAX_LENGTH"
        self._length = settings.qwen_embed_max_length if is_decoder else settings.embed_max_length
        self._served: EmbeddingModel = load_embedder(
            self.name, folder, self._length, self._target, read_overrides(entry)
        )
        if not self._served.kinds.dense:
            raise StartupError(f"{self.name} makes no dense vectors")
        self.width = self._served.dense_width
        self.usual = Reading(self._served.default_prompt, pooling=self._served.pooling)

    def embed_as_served(self, texts: Sequence[str]) -> FloatArray:
        """Embed texts as a request without options."""
        model, vectors = self._served, []
        for text in texts:
            (tokenized,) = model.tokenize([text], model.default_prompt)
            (embedding,) = model.launch([tokenized.ids], [Outputs(dense=True)])()
            if isinstance(embedding, Exception) or embedding.dense is None:
                raise CannotCompareError(f"{self.name} makes no finite vector of {text!r:.80}")
            vectors.append(embedding.dense)
        return np.stack(vectors)

    def find_reading(self, stored: Sequence[Stored]) -> tuple[Reading, int]:
        """Return the reading with the nearest vectors, and how many were tried."""
        config = SentenceConfig.read(self._folder)
        steps = [step for step in config.steps if step is not normalize]
        self._steps = [*steps, normalize] if self._served.normalizes else steps
        texts = TextOptions(lower_case=TextOptions.read(self._transformer).lower_case)
        _, after = self._served.special_tokens
        self._closing = after[-1].string if after else None
        self._backbone, _ = load_backbone(
            self._transformer, self._target, self._length, texts, closing=self._closing
        )
        by_length = sorted(stored, key=lambda item: len(item.text))
        is_short = [len(item.text) < _SHORT for item in by_length]
        short, longest = by_length[: max(_FEW, sum(is_short))], by_length[-_FEW:]
        prompts = dict.fromkeys([self.usual.prompt, "", *config.prompts.values(), *_PROMPTS])
        cases = [texts.lower_case, not texts.lower_case]
        ends = [False, True] if after else [False]
        poolings = sorted(POOLINGS.values(), key=lambda name: name != self.usual.pooling)
        nearest, best, tried = math.inf, self.usual, 0
        for prompt, lower_case, without_end in itertools.product(prompts, cases, ends):
            reading = replace(
                self.usual, prompt=prompt, lower_case=lower_case, without_end=without_end
            )
            vectors = self._pool_all(short, reading)
            for pooling in poolings:
                tried += 1
                largest = float(_distances(short, vectors[pooling]).max())
                if largest < nearest - TOLERANCES["float32"]:
                    nearest, best = largest, replace(reading, pooling=pooling)
        self.usual = replace(self.usual, lower_case=texts.lower_case)
        if _distances(longest, self.embed(longest, best)).max() <= TOLERANCES["int8"]:
            return best, tried
        sides: tuple[Side, ...] = ("right", "left")
        cut = [
            replace(best, length=length, side=side)
            for length, side in itertools.product((*_LENGTHS, None), sides)
            if length is None or length < self._served.max_length
        ]
        return min(
            (best, *cut),
            key=lambda reading: float(_distances(longest, self.embed(longest, reading)).max()),
        ), tried + len(cut)

    def embed(self, stored: Sequence[Stored], reading: Reading) -> FloatArray:
        """Embed texts by a reading."""
        return self._pool_all(stored, reading)[reading.pooling]

    @torch.inference_mode()
    def _pool_all(self, stored: Sequence[Stored], reading: Reading) -> dict[str, FloatArray]:
        """Embed texts by a reading with each pooling."""
        tokenizer = TextTokenizer.from_folder(
            self._transformer,
            min(self._served.max_length, reading.length or self._served.max_length),
            closing=self._closing,
            lower_case=reading.lower_case,
        )
        options = TruncationOptions(side=reading.side)
        vectors: dict[str, list[FloatArray]] = {}
        for item in stored:
            (tokenized,) = tokenizer.encode([item.text], reading.prompt, options)
            ids = tokenized.ids[:-1] if reading.without_end else tokenized.ids
            packed = self._backbone.pack([ids])
            states = self._backbone.forward(packed)
            for pooling in POOLINGS.values():
                rows = pool(states, packed, (pooling,), np.zeros(1, np.int64))
                for step in self._steps:
                    rows = step(rows)
                vectors.setdefault(pooling, []).append(rows[0].cpu().numpy())
        return {pooling: np.stack(rows) for pooling, rows in vectors.items()}


def _distances(stored: Sequence[Stored], ours: FloatArray) -> FloatArray:
    """Return 1 - cosine for each text; of shorter stored vectors, with our first dimensions."""
    theirs = np.stack([item.vector for item in stored])
    ours = ours[:, : theirs.shape[1]]
    lengths = np.linalg.norm(theirs, axis=1) * np.linalg.norm(ours, axis=1)
    distances: FloatArray = 1 - (theirs * ours).sum(axis=1) / np.maximum(lengths, 1e-12)
    return distances


def _describe(distances: FloatArray) -> str:
    largest = float(distances.max())
    explained = [name for name, tolerance in TOLERANCES.items() if largest <= tolerance]
    reason = f", which rounding in {explained[0]} explains" if explained else ""
    return (
        f"of {len(distances)} texts, 1 - cosine is {max(0.0, largest):.1e} at most, median "
        f"{max(0.0, float(np.median(distances))):.1e}{reason}"
    )


def _describe_shape(stored: Sequence[Stored], ours: FloatArray) -> str:
    """Say how their widths and lengths differ from ours, if they do."""
    remarks = ""
    width = len(stored[0].vector)
    if width < ours.shape[1]:
        remarks += f'; they have "dimensions": {width}'
        ours = ours[:, :width]
    theirs_length, our_length = (
        float(np.median(np.linalg.norm(rows, axis=1)))
        for rows in (np.stack([item.vector for item in stored]), ours)
    )
    if abs(theirs_length - our_length) > _LENGTH_TOLERANCE * max(theirs_length, our_length):
        remarks += f"; their length is {theirs_length:.4g}, and that of ours {our_length:.4g}"
        if width == ours.shape[1] and abs(theirs_length - 1) < _LENGTH_TOLERANCE:
            remarks += " (NORMALIZE=true)"
        elif abs(our_length - 1) < _LENGTH_TOLERANCE:
            remarks += " (NORMALIZE=false)"
    return remarks
