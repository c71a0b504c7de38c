"""From an entry to a model: its folder is found, and it is loaded on its devices.

It is loaded as what its files say it is for. When that happens, and when its token budget is
measured, is the engine's affair.
"""

import gc
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import structlog
import torch

from smart_embedder.errors import StartupError
from smart_embedder.hardware import device as choose
from smart_embedder.hardware.cpu import (
    CpuShare,
    available_threads,
    lower_thread_priority,
    share_cpus,
)
from smart_embedder.interface import (
    DefaultModels,
    DeviceInfo,
    DownloadStatus,
    Embedder,
    LoadPlan,
    Measured,
    MemoryUsage,
    ModelInfo,
    PlacedModel,
    PlacedModels,
    human_size,
)
from smart_embedder.kernels.target import ATTENTION, Target, choose_backend
from smart_embedder.models.families.registry import (
    is_quantized_by_layers,
    is_qwen3,
    overflows_float16,
)
from smart_embedder.models.files import config
from smart_embedder.models.files.digest import noting
from smart_embedder.models.files.reading import reading, trim_heap
from smart_embedder.models.files.weights import count_parameters
from smart_embedder.models.heads import embedder as embedders
from smart_embedder.models.heads.colbert import ColbertEmbedder, is_colbert
from smart_embedder.models.heads.dense import DenseEmbedder
from smart_embedder.models.heads.m3 import HEADS, M3Embedder
from smart_embedder.models.heads.splade import SpladeEmbedder
from smart_embedder.models.rerankers.cross_encoder import CrossEncoder, is_classifier
from smart_embedder.models.rerankers.llm import QwenReranker
from smart_embedder.models.runner import DeviceModel
from smart_embedder.models.warmup import named_or_chosen, probe
from smart_embedder.settings import (
    FLOAT8,
    INT8,
    EngineSettings,
    ModelEntry,
    public_name,
)

log = structlog.get_logger(__name__)

# What a model takes beside its weights.
_OVERHEAD = 1.05
# Bytes that are taken while models are loaded, beside them: tokenizers, threads, the proof.
_BESIDE_WEIGHTS = 2**25
# Seconds of a forward that is measured while the device serves other models.
_LONGEST_RUN = 0.1
# Modules that make sparse vectors in ways that are not computed here.
_SPARSE_ALONE = {"Router", "Asym", "SparseAutoEncoder", "SparseStaticEmbedding"}

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Placement:
    """A device for a model, by its worker's name; a CPU's has a share where `workers` share it."""

    name: str
    device: torch.device
    share: CpuShare | None = None
    workers: int = 1

    @property
    def memory(self) -> str:
        """The name of its memory."""
        return "cpu" if self.device.type == "cpu" else self.name

    @property
    def node(self) -> tuple[str, int]:
        """Where workers share one copy."""
        return self.memory, self.share.node if self.share is not None else 0

    def run(self, call: Callable[[], Result]) -> Result:
        """Run `call` on the cores of the share: the system gives a thread its own node's memory."""
        if self.share is None:
            return call()
        return self.share.run(partial(copy_context().run, call))


def _workers(settings: EngineSettings) -> Iterator[_Placement]:
    """Those that DEVICE names."""
    if settings.device.startswith("cpu:") and len(settings.devices) > 1:
        cpu = torch.device("cpu")
        shares = share_cpus(settings.devices)
        yield from (_Placement(share.name, cpu, share, len(shares)) for share in shares)
        return
    for name in settings.devices:
        device = choose.choose_device(name)
        yield _Placement(str(device), device)


def load_embedder(
    name: str,
    folder: Path,
    max_length: int,
    target: Target,
    overrides: config.SentenceOverrides = config.NO_OVERRIDES,
) -> embedders.EmbeddingModel:
    """Load an embedding model; raises `StartupError`, also for `overrides` without effect."""
    _warn_of_code(name, folder)
    with noting(folder) as content:
        model = _make_embedder(name, folder, max_length, target, overrides)
    model.prompts = {**model.prompts, **overrides.prompts}
    model.identify(content)
    return model


def _make_embedder(
    name: str,
    folder: Path,
    max_length: int,
    target: Target,
    overrides: config.SentenceOverrides,
) -> embedders.EmbeddingModel:
    for module in config.read_modules(folder):
        if module.kind in _SPARSE_ALONE:
            raise StartupError(
                f"{folder} makes sparse vectors by {module.kind}, which is not computed here; "
                "SpladePooling is"
            )
        if module.kind == "SpladePooling":
            overrides.refuse("pooling", "normalize", for_model=f"{name}, a SPLADE model")
            return SpladeEmbedder(name, folder, max_length, target, pooling=module.folder)
    if is_colbert(folder):
        every = ("pooling", "normalize", "query_prompt", "document_prompt")
        overrides.refuse(*every, for_model=f"{name}, a ColBERT model")
        return ColbertEmbedder(name, folder, max_length, target)
    if any((folder / head).is_file() for head in HEADS):
        kind = f"{name}, which is of bge-m3's kind"
        overrides.refuse("pooling", "normalize", for_model=kind)
        return M3Embedder(name, folder, max_length, target)
    return DenseEmbedder(name, folder, max_length, target, overrides)


def load_reranker(
    name: str, folder: Path, max_length: int, target: Target, *, max_qwen_pairs: int
) -> CrossEncoder | QwenReranker:
    """Load a reranker; one of Qwen3's kind has at most `max_qwen_pairs` pairs in a forward."""
    _warn_of_code(name, folder)
    model: CrossEncoder | QwenReranker
    with noting(folder) as content:
        if is_qwen3(folder) and not is_classifier(folder):
            model = QwenReranker(name, folder, max_length, max_qwen_pairs, target)
        else:
            model = CrossEncoder(name, folder, max_length, target)
    model.identify(content)
    return model


def _warn_of_code(name: str, folder: Path) -> None:
    """Log that a model names code of its own, where a class of transformers takes its place."""
    for file in ("config.json", "tokenizer_config.json"):
        if "auto_map" in config.read_optional(folder / file):
            log.warning(
                "checkpoint_code_ignored",
                model=name,
                detail=f"{file} names code of its own (auto_map), which is never run: the class of "
                "transformers is computed, which may differ",
            )


def overrides_in(entry: ModelEntry) -> config.SentenceOverrides:
    """What an entry says of its model."""
    names = (each.name for each in fields(config.SentenceOverrides))
    return config.SentenceOverrides(**{name: getattr(entry, name) for name in names})


def _described(placement: _Placement, model: ModelInfo) -> DeviceInfo:
    """The hardware, with the number format and the attention of a model on it."""
    device, description = placement.device, choose.describe_device(placement.device)
    if placement.share is not None:
        description = f"{description}, shared by {placement.workers} workers"
    return DeviceInfo(
        name=placement.name,
        description=description,
        dtype=model.dtype,
        attention=model.paths[ATTENTION],
        gpu_available=device.type != "cpu",
        device_count=torch.cuda.device_count(),
        memory_bytes=choose.memory_bytes(device),
        read_memory=choose.make_memory_reader(device),
        host_memory_left=choose.host_memory_left,
    )


class EntryLoader:
    """Implements `smart_embedder.interface.ModelLoader`; `status` shows a download."""

    def __init__(self, settings: EngineSettings, status: DownloadStatus | None = None) -> None:
        self._settings = settings
        self._status = status or DownloadStatus()
        self._workers = list(_workers(settings))
        available_threads()  # Of the process, before `prepare_thread` gives one thread fewer.

    def prepare_thread(self) -> None:
        """Make the calling thread leave the processor to others."""
        lower_thread_priority()
        torch.set_num_threads(1)

    def read_memory(self, name: str) -> MemoryUsage:
        """The usage of a device's memory."""
        return choose.memory_usage(torch.device(name))

    def free_memory(self) -> None:
        """Give back what models that were unloaded have left."""
        gc.collect()
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            choose.empty_cuda_cache()
        trim_heap()

    def load_defaults(self) -> DefaultModels:
        """Load the models that have settings of their own; raises `StartupError`."""
        entries, loaded = self._settings.default_entries, []
        folders = locate_models(self._settings, self._status)
        pairs = zip(entries, folders, strict=True)
        models = [(entry, folder) for entry, folder in pairs if entry and folder]
        self._require_memory(models)
        for entry, folder in models:
            loaded.append(self._load(entry, folder, self._workers))
            model = loaded[-1].models[0].model
            if entry is entries.dense and not cast(Embedder, model).kinds.dense:
                raise StartupError(f"DENSE_EMBEDDING_MODEL={model.name} makes no dense vectors")
        # Before a budget is measured: graphs take of the memory that batches of all models have.
        for copy in (copy for each in loaded for copy in each.models):
            cast(DeviceModel[Any], copy.model).capture_graphs()
        return DefaultModels(tuple(loaded), self)

    def plan(self, entry: ModelEntry) -> LoadPlan:
        """Find the model's files, and say how much memory they take."""
        folder = locate_model(entry.name, entry.revision, self._settings, self._status)
        placements = list(_placements_of(entry, self._workers))
        needs = self._needs(entry, folder, placements)
        load = partial(self._load, entry, folder, placements)
        # A text that changes when files of the model are replaced; none of them is read.
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        states = [(path.relative_to(folder).as_posix(), path.stat()) for path in files]
        state = repr([(name, state.st_size, state.st_mtime_ns) for name, state in states])
        return LoadPlan(needs, load, state)

    def _needs(
        self, entry: ModelEntry, folder: Path, placements: Sequence[_Placement]
    ) -> dict[str, int]:
        """The bytes that the weights take of each memory."""
        needs: dict[str, int] = {}
        for each in {placement.node: placement for placement in placements}.values():
            target = self._target_of(entry, folder, each)
            size = target.dtype.itemsize
            if target.quantized:
                size = 1 if is_quantized_by_layers(folder) else torch.float32.itemsize
            bytes_ = int(_OVERHEAD * size * count_parameters(folder))
            needs[each.memory] = needs.get(each.memory, 0) + bytes_
        return needs

    def _require_memory(self, models: Iterable[tuple[ModelEntry, Path]]) -> None:
        """Raise `StartupError` where the system would kill the process for loading its models."""
        needs = (self._needs(entry, folder, self._workers) for entry, folder in models)
        needed = sum(each.get("cpu", 0) for each in needs) + _BESIDE_WEIGHTS
        left = choose.host_memory_left()
        if needed > left:
            raise StartupError(
                f"the memory has no room for the models: they take {human_size(needed)}, "
                f"and {human_size(left)} are left: raise the memory limit of the machine or "
                f"container by at least {human_size(needed - left)}, or choose smaller models"
            )

    def _load(
        self, entry: ModelEntry, folder: Path, placements: Sequence[_Placement]
    ) -> PlacedModels:
        """Load it on each device; those on one memory node share a copy."""
        copies: dict[tuple[str, int], DeviceModel[Any]] = {}
        measured: dict[tuple[str, int], Measured] = {}
        with reading():
            for each in placements:
                if each.node not in copies:
                    copies[each.node] = each.run(partial(self._load_on, each, entry, folder))
        trim_heap()
        first = copies[placements[0].node]
        return PlacedModels(
            tuple(self._placed(each, copies[each.node], measured) for each in placements),
            lambda: first.info,
            config.read_config(folder).get(config.DEMO_KEY),
        )

    def _load_on(self, placement: _Placement, entry: ModelEntry, folder: Path) -> DeviceModel[Any]:
        settings, is_qwen = self._settings, is_qwen3(folder)
        target = self._target_of(entry, folder, placement)
        model: DeviceModel[Any]
        if entry.task == "embed":
            usual = settings.qwen_embed_max_length if is_qwen else settings.embed_max_length
            length = entry.max_length or usual
            model = load_embedder(entry.public_name, folder, length, target, overrides_in(entry))
        else:
            usual = settings.qwen_rerank_max_length if is_qwen else settings.bge_rerank_max_length
            length, pairs = entry.max_length or usual, settings.qwen_rerank_batch_size
            model = load_reranker(entry.public_name, folder, length, target, max_qwen_pairs=pairs)
        if settings.reproducible:
            model.run_alone()
        return model

    def _target_of(self, entry: ModelEntry, folder: Path, placement: _Placement) -> Target:
        """What the model computes on; the dtype depends on the model."""
        device, share = placement.device, placement.share
        choose.ensure_allocates(device)
        named = entry.dtype or self._settings.dtype
        dtype = choose.choose_dtype(named, device, qwen=overflows_float16(folder))
        # Another device than DEVICE may not have the attention that was named.
        attention = self._settings.attention if entry.device is None else "auto"
        return Target(
            device,
            dtype,
            choose_backend(device, dtype, attention),
            quantized=named == INT8,
            float8=named == FLOAT8,
            attention_named=attention != "auto",
            cpu_threads=None if share is None else share.threads,
        )

    def _placed(
        self,
        placement: _Placement,
        model: DeviceModel[Any],
        measured: dict[tuple[str, int], Measured],
    ) -> PlacedModel:
        """The model on a device; each copy of it is `measured` once, by its node."""

        def measure(thoroughly: bool) -> Iterator[Measured | None]:
            if placement.node not in measured:
                yield from model.capture_graphs_in_steps()
                longest_run = math.inf if thoroughly else _LONGEST_RUN
                for found in probe(model, placement.device, longest_run, placement.workers):
                    if found is None:
                        yield None
                        continue
                    budget = named_or_chosen(found, self._settings.max_batch_tokens)
                    measured[placement.node] = Measured(budget.tokens, budget.seconds_per_token)
                    log.info(
                        "token_budget",
                        model=model.name,
                        device=placement.name,
                        tokens=budget.tokens,
                        reason=budget.reason,
                    )
            yield measured[placement.node]

        free, share = choose.make_memory_freer(placement.device), placement.share
        bind_thread = None if share is None else share.bind_thread
        device = _described(placement, model.info)
        return PlacedModel(model, device, measure, free, bind_thread)


def _placements_of(entry: ModelEntry, workers: Sequence[_Placement]) -> Iterator[_Placement]:
    """Where a model is to be: on every worker, or on the devices that it names."""
    if entry.device is None:
        yield from workers
        return
    for name in map(str.strip, entry.device.split(",")):
        device = choose.choose_device(name)
        # Without a number it is the first of its kind.
        same = [
            each
            for each in workers
            if each.device.type == device.type and (each.device.index or 0) == (device.index or 0)
        ]
        named = [each for each in same if each.name == name]
        if device.type == "cpu" and ":" in name and same and not named:
            raise StartupError(f"{entry.location}: device={name} is none of DEVICE's workers")
        yield from named or same or [_Placement(str(device), device)]


class ModelFolders(NamedTuple):
    """The folders of the models; None for a model that is not separate."""

    embedding: Path
    dense: Path | None
    reranker: Path | None


def locate_models(settings: EngineSettings, status: DownloadStatus | None = None) -> ModelFolders:
    """Find the default models, each in its own revision; download those that are not there."""
    status = status or DownloadStatus()
    embedder, dense, reranker = settings.default_entries

    def find(entry: ModelEntry | None, name: str, revision: str | None) -> Path | None:
        if entry is not None:
            return locate_model(name, revision, settings, status)
        _warn_of_revision(name, revision)
        return None

    return ModelFolders(
        locate_model(embedder.name, embedder.revision, settings, status),
        find(dense, settings.dense_model, settings.dense_model_revision),
        find(reranker, settings.reranker_model, settings.reranker_model_revision),
    )


def locate_model(
    name: str, revision: str | None, settings: EngineSettings, status: DownloadStatus
) -> Path:
    """Find a model by its name in a setting; download it if it is not on the disk."""
    # Unlike pathlib's, this one does not raise where there is no home folder.
    folder = Path(os.path.expanduser(name))  # noqa: PTH111
    if folder.is_dir():
        _warn_of_revision(name, revision)
        return folder
    # Only here: a local folder needs no library of the hub, and without a home there is no cache.
    from smart_embedder.models.files.hub import Hub, locate  # noqa: PLC0415

    return locate(name, Hub(settings.hub_cache, revision, settings.hf_hub_offline, status))


def _warn_of_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        log.warning("revision_not_used", model=public_name(name), revision=revision)
