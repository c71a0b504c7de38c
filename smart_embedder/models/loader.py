"""Finds the folder of a configured model, and loads the model on its devices.

The files of a model decide which class loads it. The engine decides when a model is loaded and when
its token budget is measured.
"""

import gc
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass, fields
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import structlog
import torch

from smart_embedder.errors import StartupError
from smart_embedder.hardware import device as hardware
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
from smart_embedder.models.extractors.token_classifier import TokenClassifier, is_gliner2
from smart_embedder.models.families.registry import has_own_layers, is_qwen3, overflows_float16
from smart_embedder.models.files import config
from smart_embedder.models.files.adapters import overlay_adapter
from smart_embedder.models.files.reading import refuse_changed_files, trim_heap
from smart_embedder.models.files.record import record_reading
from smart_embedder.models.files.weights import count_parameters
from smart_embedder.models.heads import embedder as embedders
from smart_embedder.models.heads.colbert import ColbertEmbedder, is_colbert
from smart_embedder.models.heads.dense import DenseEmbedder
from smart_embedder.models.heads.m3 import HEADS, M3Embedder
from smart_embedder.models.heads.splade import SpladeEmbedder
from smart_embedder.models.heads.static import StaticEmbedder, is_static
from smart_embedder.models.rerankers.reranker import make_reranker
from smart_embedder.models.runner import DeviceModel
from smart_embedder.models.warmup import apply_budget_setting, probe_budget
from smart_embedder.settings import FLOAT8, INT8, EngineSettings, ModelEntry, public_name

log = structlog.get_logger(__name__)

# The memory of a model, as a multiple of its weights.
_OVERHEAD = 1.05
# Bytes that loading takes besides the models: tokenizers, threads, the proof.
_BESIDE_WEIGHTS = 2**25
# The longest measured forward, in seconds, while the device serves other models.
_LONGEST_RUN = 0.1

Result = TypeVar("Result")
Model = TypeVar("Model", bound=DeviceModel[Any])
Options = ParamSpec("Options")
# Loads a model by its name, from its folder.
Load = Callable[Concatenate[str, Path, Options], Model]


@dataclass(frozen=True, slots=True)
class _Placement:
    """A device for a model, and the name of its worker; on a CPU `workers` share the cores."""

    name: str
    device: torch.device
    share: CpuShare | None = None
    workers: int = 1

    @property
    def memory(self) -> str:
        """The name of the device's memory."""
        return "cpu" if self.device.type == "cpu" else self.name

    @property
    def node(self) -> tuple[str, int]:
        """The memory node, on which workers share one copy of a model."""
        return self.memory, self.share.node if self.share is not None else 0

    def run(self, call: Callable[[], Result]) -> Result:
        """Run `call` on the cores of the share: the system gives a thread its own node's memory."""
        if self.share is None:
            return call()
        return self.share.run(partial(copy_context().run, call))


def _read_workers(settings: EngineSettings) -> Iterator[_Placement]:
    """Yield a placement for each worker that DEVICE names."""
    if settings.device.startswith("cpu:") and len(settings.devices) > 1:
        cpu = torch.device("cpu")
        shares = share_cpus(settings.devices)
        yield from (_Placement(share.name, cpu, share, len(shares)) for share in shares)
        return
    for name in settings.devices:
        device = hardware.choose_device(name)
        yield _Placement(str(device), device)


def _read_all(load: Load[Options, Model]) -> Load[Options, Model]:
    """Let a function load a model whose vector spaces follow from what is read meanwhile.

    It raises `StartupError` if the model leaves a tensor of the folder unread.
    """

    @wraps(load)
    def load_all(
        name: str, folder: Path, /, *args: Options.args, **options: Options.kwargs
    ) -> Model:
        _warn_of_ignored_code(name, folder)
        with record_reading(folder, config.transformer_folder(folder)) as record:
            model = load(name, folder, *args, **options)
        record.require_all_read()
        model.set_vector_spaces(record)
        return model

    return load_all


load_reranker = _read_all(make_reranker)


@_read_all
def load_embedder(
    name: str,
    folder: Path,
    max_length: int,
    target: Target,
    overrides: config.SentenceOverrides = config.NO_OVERRIDES,
) -> embedders.EmbeddingModel:
    """Load an embedding model; raises `StartupError`, also for `overrides` without effect."""
    model = _make_embedder(name, folder, max_length, target, overrides)
    model.prompts = {**model.prompts, **overrides.prompts}
    return model


def _make_embedder(
    name: str,
    folder: Path,
    max_length: int,
    target: Target,
    overrides: config.SentenceOverrides,
) -> embedders.EmbeddingModel:
    for module in config.read_modules(folder):
        if module.kind == "SpladePooling":
            overrides.refuse("pooling", "normalize", for_model=f"{name}, a SPLADE model")
            return SpladeEmbedder(name, folder, max_length, target, pooling=module.folder)
    if is_colbert(folder):
        settings = ("pooling", "normalize", "query_prompt", "document_prompt")
        overrides.refuse(*settings, for_model=f"{name}, a ColBERT model")
        return ColbertEmbedder(name, folder, max_length, target)
    if any((folder / head).is_file() for head in HEADS):
        overrides.refuse("pooling", "normalize", for_model=f"{name}, which is of bge-m3's kind")
        return M3Embedder(name, folder, max_length, target)
    model_type = config.read_transformer_config(folder).get("model_type")
    reads_messages = config.reads_image_messages(config.transformer_folder(folder))
    if reads_messages or model_type in config.IMAGE_TEXT_TYPES | config.PAGE_TYPES.keys():
        # transformers takes seconds to import, and most models do not need it.
        from smart_embedder.models.heads import image_text  # noqa: PLC0415

        is_of_pages = model_type in config.PAGE_TYPES
        kind = image_text.PageEmbedder if is_of_pages else image_text.ImageTextEmbedder
        return (image_text.MessageEmbedder if reads_messages else kind)(
            name, folder, max_length, target, overrides
        )
    if is_static(folder):
        return StaticEmbedder(name, folder, max_length, target, overrides)
    return DenseEmbedder(name, folder, max_length, target, overrides)


@_read_all
def load_extractor(name: str, folder: Path, max_length: int, target: Target) -> DeviceModel[Any]:
    """Load a model that finds spans of texts; raises `StartupError`."""
    if not is_gliner2(folder):
        return TokenClassifier(name, folder, max_length, target)
    # transformers takes seconds to import, and most models do not need it.
    from smart_embedder.models.extractors.gliner2 import Gliner2Extractor  # noqa: PLC0415

    return Gliner2Extractor(name, folder, max_length, target)


def _warn_of_ignored_code(name: str, folder: Path) -> None:
    """Log that a checkpoint names code of its own, which a class of transformers replaces."""
    folder = config.transformer_folder(folder)
    for file in ("config.json", "tokenizer_config.json"):
        if "auto_map" in config.read_optional(folder / file):
            log.warning(
                "checkpoint_code_ignored",
                model=name,
                detail=f"{file} names code of its own (auto_map), which is never run: the class of "
                "transformers is used instead, which may compute other results",
            )


def read_overrides(entry: ModelEntry) -> config.SentenceOverrides:
    """Copy the fields of `entry` that override a model's own configuration."""
    names = (field.name for field in fields(config.SentenceOverrides))
    return config.SentenceOverrides(**{name: getattr(entry, name) for name in names})


def _describe_device(placement: _Placement, model: ModelInfo) -> DeviceInfo:
    """Describe a device, with the number format and the attention of the model on it."""
    device, description = placement.device, hardware.describe_device(placement.device)
    if placement.share is not None:
        description = f"{description}, shared by {placement.workers} workers"
    return DeviceInfo(
        name=placement.name,
        description=description,
        dtype=model.dtype,
        attention=model.paths[ATTENTION],
        gpu_available=device.type != "cpu",
        device_count=torch.cuda.device_count(),
        memory_bytes=hardware.memory_bytes(device),
        read_memory=hardware.make_memory_reader(device),
        host_memory_left=hardware.host_memory_left,
    )


class EntryLoader:
    """Implements `smart_embedder.interface.ModelLoader`; `status` shows a running download."""

    def __init__(self, settings: EngineSettings, status: DownloadStatus | None = None) -> None:
        self._settings = settings
        self._status = status or DownloadStatus()
        self._workers = list(_read_workers(settings))
        available_threads()  # Caches the number before `prepare_thread` reduces it.

    def prepare_thread(self) -> None:
        """Lower the priority of the calling thread, and limit PyTorch to one thread in it."""
        lower_thread_priority()
        torch.set_num_threads(1)

    def read_memory(self, name: str) -> MemoryUsage:
        """Return the usage of a device's memory."""
        return hardware.memory_usage(torch.device(name))

    def free_memory(self) -> None:
        """Return the memory of unloaded models to the system."""
        gc.collect()
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            hardware.empty_cuda_cache()
        trim_heap()

    def load_defaults(self) -> DefaultModels:
        """Load the models that have settings of their own; raises `StartupError`."""
        entries, loaded = self._settings.default_entries, []
        pairs = zip(entries, locate_models(self._settings, self._status), strict=True)
        models = [(entry, folder) for entry, folder in pairs if entry and folder]
        self._require_memory(models)
        for entry, folder in models:
            loaded.append(self._load(entry, folder, self._workers))
            model = loaded[-1].models[0].model
            if entry is entries.dense and not cast(Embedder, model).kinds.dense:
                raise StartupError(f"DENSE_EMBEDDING_MODEL={model.name} makes no dense vectors")
        # Before a budget is measured, because graphs and batches share the memory.
        for placed_models in loaded:
            for placed in placed_models.models:
                cast(DeviceModel[Any], placed.model).capture_graphs()
        return DefaultModels(tuple(loaded), self)

    def plan(self, entry: ModelEntry) -> LoadPlan:
        """Find the model's files, and compute how much memory it takes."""
        folder = locate_model(entry.name, entry.revision, self._settings, self._status)
        placements = list(_find_placements(entry, self._workers))
        needs = self._compute_needs(entry, folder, placements)
        load = partial(self._load, entry, folder, placements)
        # A string that changes when files of the model are replaced; none of them is read.
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        states = [(path.relative_to(folder).as_posix(), path.stat()) for path in files]
        state = repr([(name, state.st_size, state.st_mtime_ns) for name, state in states])
        return LoadPlan(needs, load, state)

    def _compute_needs(
        self, entry: ModelEntry, folder: Path, placements: Sequence[_Placement]
    ) -> dict[str, int]:
        """Compute the bytes that the model takes of each memory."""
        needs: dict[str, int] = {}
        for placement in {placement.node: placement for placement in placements}.values():
            target = self._choose_target(entry, folder, placement)
            size = target.dtype.itemsize
            if target.quantized:
                size = 1 if has_own_layers(folder) else torch.float32.itemsize
            bytes_ = int(_OVERHEAD * size * count_parameters(folder))
            needs[placement.memory] = needs.get(placement.memory, 0) + bytes_
        return needs

    def _require_memory(self, models: Iterable[tuple[ModelEntry, Path]]) -> None:
        """Raise `StartupError` where the system would kill the process for loading its models."""
        needs = (self._compute_needs(entry, folder, self._workers) for entry, folder in models)
        needed = sum(by_memory.get("cpu", 0) for by_memory in needs) + _BESIDE_WEIGHTS
        left = hardware.host_memory_left()
        if needed > left:
            raise StartupError(
                f"the memory has no room for the models: they take {human_size(needed)}, "
                f"and {human_size(left)} are left: raise the memory limit of the machine or "
                f"container by at least {human_size(needed - left)}, or choose smaller models"
            )

    def _load(
        self, entry: ModelEntry, folder: Path, placements: Sequence[_Placement]
    ) -> PlacedModels:
        """Load the model on each device; devices on one memory node share a copy."""
        copies: dict[tuple[str, int], DeviceModel[Any]] = {}
        measured: dict[tuple[str, int], Measured] = {}
        with refuse_changed_files():
            for placement in placements:
                if placement.node not in copies:
                    load = partial(self._load_on, placement, entry, folder)
                    copies[placement.node] = placement.run(load)
        trim_heap()
        first = copies[placements[0].node]
        return PlacedModels(
            tuple(
                self._place(placement, copies[placement.node], measured) for placement in placements
            ),
            lambda: first.info,
            config.read_transformer_config(folder).get(config.DEMO_KEY),
        )

    def _load_on(self, placement: _Placement, entry: ModelEntry, folder: Path) -> DeviceModel[Any]:
        settings, is_qwen = self._settings, is_qwen3(folder)
        target = self._choose_target(entry, folder, placement)
        model: DeviceModel[Any]
        if entry.task == "embed":
            default = settings.qwen_embed_max_length if is_qwen else settings.embed_max_length
            length = entry.max_length or default
            model = load_embedder(entry.public_name, folder, length, target, read_overrides(entry))
        elif entry.task == "extract":
            length = entry.max_length or settings.embed_max_length
            model = load_extractor(entry.public_name, folder, length, target)
        else:
            default = settings.qwen_rerank_max_length if is_qwen else settings.bge_rerank_max_length
            length, pairs = entry.max_length or default, settings.qwen_rerank_batch_size
            model = load_reranker(
                entry.public_name, folder, length, target, max_pairs=pairs, kind=entry.kind
            )
        if settings.reproducible:
            model.make_reproducible()
        return model

    def _choose_target(self, entry: ModelEntry, folder: Path, placement: _Placement) -> Target:
        """Return the device, number format and kernels for the model."""
        device, share = placement.device, placement.share
        hardware.ensure_allocates(device)
        named = entry.dtype or self._settings.dtype
        dtype = hardware.choose_dtype(named, device, qwen=overflows_float16(folder))
        # A device that DEVICE does not name may lack the attention of ATTENTION.
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

    def _place(
        self,
        placement: _Placement,
        model: DeviceModel[Any],
        measured: dict[tuple[str, int], Measured],
    ) -> PlacedModel:
        """Join a model with its device; the budget of each copy, by its node, is measured once."""

        def measure(thoroughly: bool) -> Iterator[Measured | None]:
            if placement.node not in measured:
                yield from model.capture_graphs_in_steps()
                longest_run = math.inf if thoroughly else _LONGEST_RUN
                for probed in probe_budget(model, placement.device, longest_run, placement.workers):
                    if probed is None:
                        yield None
                        continue
                    budget = apply_budget_setting(probed, self._settings.max_batch_tokens)
                    measured[placement.node] = Measured(budget.tokens, budget.seconds_per_token)
                    log.info(
                        "token_budget",
                        model=model.name,
                        device=placement.name,
                        tokens=budget.tokens,
                        reason=budget.reason,
                    )
            yield measured[placement.node]

        free, share = hardware.make_memory_freer(placement.device), placement.share
        bind_thread = None if share is None else share.bind_thread
        device = _describe_device(placement, model.info)
        return PlacedModel(model, device, measure, free, bind_thread)


def _find_placements(entry: ModelEntry, workers: Sequence[_Placement]) -> Iterator[_Placement]:
    """Yield the placements of a model: every worker, or the devices that its entry names."""
    if entry.device is None:
        yield from workers
        return
    for name in map(str.strip, entry.device.split(",")):
        device = hardware.choose_device(name)
        # A device without a number is the first of its kind.
        key = device.type, device.index or 0
        same = [
            worker for worker in workers if (worker.device.type, worker.device.index or 0) == key
        ]
        named = [worker for worker in same if worker.name == name]
        if device.type == "cpu" and ":" in name and same and not named:
            raise StartupError(f"{entry.location}: device={name} is none of DEVICE's workers")
        yield from named or same or [_Placement(str(device), device)]


class ModelFolders(NamedTuple):
    """The folders of the default models; None for one that is not a model of its own."""

    embedding: Path
    dense: Path | None
    reranker: Path | None


def locate_models(settings: EngineSettings, status: DownloadStatus | None = None) -> ModelFolders:
    """Find the default models on the disk, each in its own revision, or download them."""
    status, entries = status or DownloadStatus(), settings.default_entries
    folders = ModelFolders._make(
        entry and locate_model(entry.name, entry.revision, settings, status) for entry in entries
    )
    if entries.dense is None:
        _warn_of_revision(settings.dense_model, settings.dense_model_revision)
    if entries.reranker is None:
        _warn_of_revision(settings.reranker_model, settings.reranker_model_revision)
    return folders


def locate_model(
    name: str, revision: str | None, settings: EngineSettings, status: DownloadStatus
) -> Path:
    """Find a model by its name in a setting, an adapter with its base model.

    What is not on the disk is downloaded.
    """
    locate = partial(_locate_folder, settings=settings, status=status)
    return overlay_adapter(locate(name, revision), locate)


def _locate_folder(
    name: str, revision: str | None, settings: EngineSettings, status: DownloadStatus
) -> Path:
    # Path.expanduser would raise where there is no home folder.
    folder = Path(os.path.expanduser(name))  # noqa: PTH111
    if folder.is_dir():
        _warn_of_revision(name, revision)
        return folder
    # Imported only here: a local folder needs neither the hub's library nor a cache folder.
    from smart_embedder.models.files.hub import HubOptions, find_or_download  # noqa: PLC0415

    hub = HubOptions(settings.hub_cache, revision, settings.hf_hub_offline, status)
    return find_or_download(name, hub)


def _warn_of_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        log.warning("revision_not_used", model=public_name(name), revision=revision)
