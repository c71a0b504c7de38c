"""From settings to warm models: those of the start (`load`), and single ones later (`EntryLoader`).

Both find a model's folder, place it on devices, load it there as what its files say it is for, and
measure its token budget. When an entry is loaded is the engine's affair.
"""

import gc
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
import torch

from smart_embedder.engine.canaries import CANARIES
from smart_embedder.engine.model import (
    DeviceInfo,
    DownloadStatus,
    LoadedModels,
    LoadPlan,
    Measured,
    MemoryUsage,
    ModelInfo,
    PlacedModel,
    PlacedModels,
)
from smart_embedder.errors import StartupError
from smart_embedder.models.budget import (
    capped,
    named_or_chosen,
    probe,
    probe_in_steps,
    tokens_that_fit,
    warm_up,
)
from smart_embedder.models.checkpoint import config
from smart_embedder.models.checkpoint.content import noting
from smart_embedder.models.checkpoint.reading import reading, trim_heap
from smart_embedder.models.checkpoint.weights import count_parameters
from smart_embedder.models.device import choose
from smart_embedder.models.device.cpu import CpuShare, leave_processor_to_others, share_cpus
from smart_embedder.models.families.load import (
    is_quantized_by_layers,
    is_qwen3,
    overflows_float16,
)
from smart_embedder.models.ops.choose import choose_backend
from smart_embedder.models.ops.proof import ATTENTION, Target
from smart_embedder.models.tasks import embedders
from smart_embedder.models.tasks.colbert import ColbertEmbedder, is_colbert
from smart_embedder.models.tasks.dense import DenseEmbedder
from smart_embedder.models.tasks.rerankers import CrossEncoder, QwenReranker, is_classifier
from smart_embedder.models.tasks.splade import SpladeEmbedder
from smart_embedder.settings import FLOAT8, INT8, LATE_INTERACTION, NO_RERANKER, Settings
from smart_embedder.settings.types import ModelEntry, public_name

log = structlog.get_logger(__name__)

# What a model takes beside its weights.
_OVERHEAD = 1.05
# Seconds of a forward that is measured while the device serves other models.
_LONGEST_RUN = 0.1
# Modules that make sparse vectors in ways that are not computed here.
_SPARSE_ALONE = {"Router", "Asym", "SparseAutoEncoder", "SparseStaticEmbedding"}

Result = TypeVar("Result")


def load(settings: Settings, status: DownloadStatus | None = None) -> LoadedModels:
    """Load and warm the models of the settings; raises `StartupError` if one cannot be loaded."""
    if settings.torch_compile:
        log.warning("torch_compile_has_no_effect", reason="kernels of the service took its place")
    folders = locate_models(settings, status)
    with reading():
        first, *others = _load_workers(settings, folders)
    trim_heap()
    return replace(first, replicas=tuple(others))


@dataclass(frozen=True, slots=True)
class ModelFolders:
    """The folders of the models; None for a model that is not separate."""

    embedding: Path
    dense: Path | None
    reranker: Path | None


def locate_models(settings: Settings, status: DownloadStatus | None = None) -> ModelFolders:
    """Find the models, each in its own revision; download those that are not on the disk."""
    status = status or DownloadStatus()

    def find(name: str, revision: str | None, *no_models: str) -> Path | None:
        if name not in no_models:
            return locate_model(name, revision, settings, status)
        _warn_of_revision(name, revision)
        return None

    embedding, reranker = settings.embedding_model, settings.reranker_model
    return ModelFolders(
        locate_model(embedding, settings.model_revision, settings, status),
        find(settings.dense_model, settings.dense_model_revision, embedding),
        find(reranker, settings.reranker_model_revision, LATE_INTERACTION, NO_RERANKER),
    )


def locate_model(
    name: str, revision: str | None, settings: Settings, status: DownloadStatus
) -> Path:
    """Find a model by its name in a setting; download it if it is not on the disk."""
    # Unlike pathlib's, this one does not raise where there is no home folder.
    folder = Path(os.path.expanduser(name))  # noqa: PTH111
    if folder.is_dir():
        _warn_of_revision(name, revision)
        return folder
    # Only here: a local folder needs no library of the hub, and without a home there is no cache.
    from smart_embedder.models.checkpoint.hub import Hub, locate  # noqa: PLC0415

    return locate(name, Hub(settings.hub_cache, revision, settings.hf_hub_offline, status))


def _warn_of_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        log.warning("revision_not_used", model=public_name(name), revision=revision)


@dataclass(frozen=True, slots=True)
class _Placement:
    """A device for a model, by the name of its worker; a CPU's has a share where several share."""

    name: str
    device: torch.device
    share: CpuShare | None = None

    @property
    def memory(self) -> str:
        """The name of its memory."""
        return "cpu" if self.device.type == "cpu" else self.name

    @property
    def node(self) -> tuple[str, int]:
        """Where workers share one copy."""
        return self.memory, self.share.node if self.share is not None else 0

    @property
    def bind_thread(self) -> Callable[[], None] | None:
        """What each thread that computes there calls first."""
        return None if self.share is None else self.share.bind_thread

    def run(self, call: Callable[[], Result]) -> Result:
        """Run `call` on the cores of the share: the system gives a thread its own node's memory."""
        if self.share is None:
            return call()
        return self.share.run(partial(copy_context().run, call))


def _workers(settings: Settings) -> Iterator[_Placement]:
    """Those that DEVICE names."""
    if settings.device.startswith("cpu:") and len(settings.devices) > 1:
        cpu = torch.device("cpu")
        yield from (_Placement(share.name, cpu, share) for share in share_cpus(settings.devices))
        return
    for name in settings.devices:
        device = choose.choose_device(name)
        yield _Placement(str(device), device)


def _target_of(folder: Path, settings: Settings, placement: _Placement) -> Target:
    """The target of the model in `folder`; the dtype depends on the model."""
    device, share = placement.device, placement.share
    choose.ensure_allocates(device)
    dtype = choose.choose_dtype(settings.dtype, device, qwen=overflows_float16(folder))
    return Target(
        device,
        dtype,
        choose_backend(device, dtype, settings.attention),
        quantized=settings.dtype == INT8,
        float8=settings.dtype == FLOAT8,
        attention_named=settings.attention != "auto",
        cpu_threads=None if share is None else share.threads,
    )


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
    pooling = None
    for module in config.read_modules(folder):
        if module.kind in _SPARSE_ALONE:
            raise StartupError(
                f"{folder} makes sparse vectors by {module.kind}, which is not computed here; "
                "SpladePooling is"
            )
        if module.kind == "SpladePooling":
            pooling = module.folder
            break
    if pooling is not None:
        overrides.refuse("pooling", "normalize", for_model=f"{name}, a SPLADE model")
        return SpladeEmbedder(name, folder, max_length, target, pooling=pooling)
    if is_colbert(folder):
        every = ("pooling", "normalize", "query_prompt", "document_prompt")
        overrides.refuse(*every, for_model=f"{name}, a ColBERT model")
        return ColbertEmbedder(name, folder, max_length, target)
    if any((folder / head).is_file() for head in embedders.HEADS):
        kind = f"{name}, which is of bge-m3's kind"
        overrides.refuse("pooling", "normalize", for_model=kind)
        return embedders.M3Embedder(name, folder, max_length, target)
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


def _embedder_of(
    name: str, folder: Path, settings: Settings, placement: _Placement
) -> embedders.EmbeddingModel:
    """The embedding model of that name in a setting, for one worker."""
    limit = settings.qwen_embed_max_length if is_qwen3(folder) else settings.embed_max_length
    overrides = overrides_in(settings) if name == settings.dense_model else config.NO_OVERRIDES
    target = _target_of(folder, settings, placement)
    model = load_embedder(public_name(name), folder, limit, target, overrides)
    if settings.reproducible:
        model.run_alone()
    return model


def _reranker_of(
    name: str, folder: Path, settings: Settings, placement: _Placement
) -> CrossEncoder | QwenReranker:
    """The reranker of that name in a setting, for one worker."""
    qwen = is_qwen3(folder)
    limit = settings.qwen_rerank_max_length if qwen else settings.bge_rerank_max_length
    pairs, target = settings.qwen_rerank_batch_size, _target_of(folder, settings, placement)
    model = load_reranker(public_name(name), folder, limit, target, max_qwen_pairs=pairs)
    if settings.reproducible:
        model.run_alone()
    return model


def overrides_in(settings: Settings) -> config.SentenceOverrides:
    """What settings say of the model of dense vectors."""
    names = (each.name for each in fields(config.SentenceOverrides))
    return config.SentenceOverrides(**{name: getattr(settings, name) for name in names})


def _described(device: torch.device, model: ModelInfo) -> DeviceInfo:
    """The hardware, with the number format and the attention of a model on it."""
    return DeviceInfo(
        name=str(device),
        description=choose.describe_device(device),
        dtype=model.dtype,
        attention=model.paths[ATTENTION],
        gpu_available=device.type != "cpu",
        device_count=torch.cuda.device_count(),
        memory_bytes=choose.memory_bytes(device),
        read_memory=choose.memory_reader(device),
    )


def _load_workers(settings: Settings, folders: ModelFolders) -> Iterator[LoadedModels]:
    """The models of each worker; those on one memory node share them."""
    workers = list(_workers(settings))
    on_node: dict[tuple[str, int], LoadedModels] = {}
    for worker in workers:
        if worker.node not in on_node:
            on_node[worker.node] = worker.run(partial(_load_on, worker, settings, folders))
        models = on_node[worker.node]
        if worker.share is not None:
            description = f"{models.device.description}, shared by {len(workers)} workers"
            device = replace(models.device, name=worker.name, description=description)
            models = replace(models, device=device, prepare_thread=worker.bind_thread)
        yield models


def _load_on(worker: _Placement, settings: Settings, folders: ModelFolders) -> LoadedModels:
    """Load, warm up and measure the models of the settings for one worker."""
    device = worker.device
    embedder = _embedder_of(settings.embedding_model, folders.embedding, settings, worker)
    dense = reranker = None
    if folders.dense is not None:
        dense = _embedder_of(settings.dense_model, folders.dense, settings, worker)
    if folders.reranker is not None:
        reranker = _reranker_of(settings.reranker_model, folders.reranker, settings, worker)
    if dense is not None and not dense.kinds.dense:
        raise StartupError(f"DENSE_EMBEDDING_MODEL={dense.name} makes no dense vectors")
    others = [each for each in (dense, reranker) if each is not None]
    models = [embedder, *others]
    for model in models:
        model.capture_graphs()
    budget = probe(embedder, device)
    for other in others:
        warm_up(other)
        budget = capped(budget, tokens_that_fit(other, device))
    paths = (folders.embedding, folders.dense, folders.reranker)
    for model, folder in zip(models, filter(None, paths), strict=True):
        for _ in model.compare_canaries(settings.canaries_folder(folder)):
            pass
    budget = named_or_chosen(budget, settings.max_batch_tokens)
    log.info("token_budget", tokens=budget.tokens, reason=budget.reason)
    return LoadedModels(
        embedder=embedder,
        device=_described(device, embedder.info),
        infos=tuple(each.info for each in models),
        max_batch_tokens=budget.tokens,
        dense=dense,
        reranker=reranker,
        late_interaction=settings.reranker_model == LATE_INTERACTION,
        demo=config.read_config(folders.embedding).get(config.DEMO_KEY),
        seconds_per_token=budget.seconds_per_token,
        free_memory=choose.memory_freer(device),
    )


class EntryLoader:
    """Implements `smart_embedder.engine.model.ModelLoader`; `status` shows a download."""

    def __init__(self, settings: Settings, status: DownloadStatus | None = None) -> None:
        self._settings = settings
        self._status = status or DownloadStatus()
        self._workers = list(_workers(settings))

    def prepare_thread(self) -> None:
        """Make the calling thread leave the processor to others."""
        leave_processor_to_others()
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

    def plan(self, entry: ModelEntry) -> LoadPlan:
        """Find the model's files, and say how much memory they take."""
        settings = _settings_for(entry, self._settings)
        folder = locate_model(entry.name, entry.revision, settings, self._status)
        placements = list(_placements_of(entry, self._workers))
        needs: dict[str, int] = {}
        for each in {placement.node: placement for placement in placements}.values():
            size = _target_of(folder, settings, each).dtype.itemsize
            if settings.dtype == INT8:
                size = 1 if is_quantized_by_layers(folder) else torch.float32.itemsize
            bytes_ = int(_OVERHEAD * size * count_parameters(folder))
            needs[each.memory] = needs.get(each.memory, 0) + bytes_
        load = partial(_load, entry, settings, folder, placements)
        # A text that changes when files of the model are replaced; none of them is read.
        kept = settings.canaries_folder(folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.parent != kept)
        states = [(path.relative_to(folder).as_posix(), path.stat()) for path in files]
        state = repr([(name, state.st_size, state.st_mtime_ns) for name, state in states])
        return LoadPlan(needs, load, state)


def _settings_for(entry: ModelEntry, settings: Settings) -> Settings:
    """The settings as they are for one model."""
    update: dict[str, Any] = {"dense_embedding_model": entry.name}
    # These are for the default model of dense vectors, whose place this one takes.
    update |= {each.name: getattr(entry, each.name) for each in fields(config.SentenceOverrides)}
    if entry.dtype is not None:
        update["dtype"] = entry.dtype
    if entry.device is not None:  # Another device may not have what was named.
        update["attention"] = "auto"
    if entry.max_length is not None:
        limits = ("bge_embed", "qwen_embed", "bge_rerank", "qwen_rerank")
        update |= {f"{limit}_max_length": entry.max_length for limit in limits}
    return settings.model_copy(update=update)


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


def _load(
    entry: ModelEntry, settings: Settings, folder: Path, placements: Sequence[_Placement]
) -> PlacedModels:
    copies: dict[tuple[str, int], embedders.DeviceModel[Any]] = {}
    with reading():
        for placement in placements:
            if placement.node not in copies:
                load = _embedder_of if entry.task == "embed" else _reranker_of
                call = partial(load, entry.name, folder, settings, placement)
                _, node = placement.node  # The calling thread does for the first one.
                copies[placement.node] = placement.run(call) if node else call()
    trim_heap()
    kept = settings.canaries_folder(folder)
    placed = tuple(
        _placed(placement, copies[placement.node], settings, None if index else kept)
        for index, placement in enumerate(placements)
    )
    first = copies[placements[0].node]
    return PlacedModels(placed, lambda: first.info)


def _placed(
    placement: _Placement, model: embedders.DeviceModel[Any], settings: Settings, kept: Path | None
) -> PlacedModel:
    """The model on one device; the first one's canaries are compared with those that are `kept`."""

    def measure(thoroughly: bool) -> Iterator[Measured | None]:
        for _ in model.capture_graphs_in_steps():
            yield None
        if kept is not None:
            yield from model.compare_canaries(kept, len(CANARIES) if thoroughly else 1)
        longest_run = math.inf if thoroughly else _LONGEST_RUN
        for found in probe_in_steps(model, placement.device, longest_run):
            if found is None:
                yield None
                continue
            budget = named_or_chosen(found, settings.max_batch_tokens)
            log.info(
                "token_budget",
                model=model.name,
                device=placement.name,
                tokens=budget.tokens,
                reason=budget.reason,
            )
            yield Measured(budget.tokens, budget.seconds_per_token)

    device = replace(_described(placement.device, model.info), name=placement.name)
    free = choose.memory_freer(placement.device)
    return PlacedModel(model, device, measure, free, placement.bind_thread)
