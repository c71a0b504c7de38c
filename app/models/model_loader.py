"""Loads single models, those of MODELS, while others serve."""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch

from app.engine.download import DownloadStatus
from app.engine.loaded_models import (
    DeviceInfo,
    LoadPlan,
    Measured,
    MemoryUsage,
    PlacedModel,
    PlacedModels,
)
from app.errors import StartupError
from app.models.checkpoint.heap import trim_heap
from app.models.checkpoint.reading import reading
from app.models.checkpoint.sentence_config import SentenceOverrides
from app.models.checkpoint.weights import count_parameters
from app.models.device.choose import choose_device, memory_freer
from app.models.device.cpu_shares import CpuShare, share_cpus
from app.models.device.cpu_threads import leave_processor_to_others
from app.models.device.memory import empty_cuda_cache, memory_usage
from app.models.device_loader import DeviceLoader, describe
from app.models.locate import locate_model
from app.models.probe import probe_in_steps
from app.models.tasks.device_model import DeviceModel
from app.models.token_budget import ChosenBudget, named_or_chosen
from app.settings import INT8, Settings
from app.settings.model_entry import ModelEntry

log = structlog.get_logger(__name__)

# What a model takes beside its weights.
_OVERHEAD = 1.05
# Seconds of a forward that is measured while the device serves other models.
_LONGEST_RUN = 0.1


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


class EntryLoader:
    """Implements `app.engine.loaded_models.ModelLoader`; `status` shows a download."""

    def __init__(self, settings: Settings, status: DownloadStatus | None = None) -> None:
        self._settings = settings
        self._status = status or DownloadStatus()
        self._workers = list(_default_placements(settings))

    def prepare_thread(self) -> None:
        """Make the calling thread leave the processor to others."""
        leave_processor_to_others()
        torch.set_num_threads(1)

    def read_memory(self, name: str) -> MemoryUsage:
        """The usage of a device's memory."""
        return memory_usage(torch.device(name))

    def free_memory(self) -> None:
        """Give back what models that were unloaded have left."""
        gc.collect()
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            empty_cuda_cache()
        trim_heap()

    def plan(self, entry: ModelEntry) -> LoadPlan:
        """Find the model's files, and say how much memory they take."""
        settings = _settings_for(entry, self._settings)
        folder = locate_model(entry.name, entry.revision, settings, self._status)
        placements = list(_placements_of(entry, self._workers))
        needs: dict[str, int] = {}
        for node in {placement.node: placement for placement in placements}.values():
            loader = DeviceLoader(settings, node.device)
            needs[node.memory] = needs.get(node.memory, 0) + _bytes_of(folder, loader)
        load = partial(_load, entry, settings, folder, placements)
        return LoadPlan(needs, load, _state_of(folder))


def _state_of(folder: Path) -> str:
    """A text that changes when files of the model are replaced; reads none of them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    states = [(path.relative_to(folder).as_posix(), path.stat()) for path in files]
    return repr([(name, state.st_size, state.st_mtime_ns) for name, state in states])


def _settings_for(entry: ModelEntry, settings: Settings) -> Settings:
    """The settings as they are for one model."""
    update: dict[str, Any] = {"dense_embedding_model": entry.name}
    # These are for the default model of dense vectors, whose place this one takes.
    update |= {each.name: getattr(entry, each.name) for each in fields(SentenceOverrides)}
    if entry.dtype is not None:
        update["dtype"] = entry.dtype
    if entry.device is not None:  # Another device may not have what was named.
        update["attention"] = "auto"
    if entry.max_length is not None:
        limits = ("bge_embed", "qwen_embed", "bge_rerank", "qwen_rerank")
        update |= {f"{limit}_max_length": entry.max_length for limit in limits}
    return settings.model_copy(update=update)


def _default_placements(settings: Settings) -> Iterator[_Placement]:
    """Those of the workers that DEVICE names."""
    cpu = torch.device("cpu")
    if settings.device.startswith("cpu:") and len(settings.devices) > 1:
        yield from (_Placement(share.name, cpu, share) for share in share_cpus(settings.devices))
        return
    for name in settings.devices:
        device = choose_device(name)
        yield _Placement(str(device), device)


def _placements_of(entry: ModelEntry, workers: Sequence[_Placement]) -> Iterator[_Placement]:
    """Where a model is to be: on every worker, or on the devices that it names."""
    if entry.device is None:
        yield from workers
        return
    for name in entry.device.split(","):
        device = choose_device(name.strip())
        same = [each for each in workers if _is_same(each.device, device)]
        named = [each for each in same if each.name == name.strip()]
        if device.type == "cpu" and ":" in name and same and not named:
            raise StartupError(
                f"{entry.location}: device={name.strip()} is none of DEVICE's workers"
            )
        yield from named or same or [_Placement(str(device), device)]


def _is_same(one: torch.device, other: torch.device) -> bool:
    """Whether both name one device: without a number it is the first."""
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def _bytes_of(folder: Path, loader: DeviceLoader) -> int:
    """How much memory the model will take, about."""
    size = 1 if loader.settings.dtype == INT8 else loader.target_of(folder).dtype.itemsize
    return int(_OVERHEAD * size * count_parameters(folder))


def _load(
    entry: ModelEntry, settings: Settings, folder: Path, placements: Sequence[_Placement]
) -> PlacedModels:
    copies: dict[tuple[str, int], DeviceModel[Any]] = {}
    with reading(with_digests=settings.caches_embeddings) as read:
        for placement in placements:
            if placement.node not in copies:
                threads = placement.share.threads if placement.share is not None else None
                loader = DeviceLoader(settings, placement.device, threads)
                load = loader.load_embedder if entry.task == "embed" else loader.load_reranker_named
                copies[placement.node] = _run_there(placement, partial(load, entry.name, folder))
    trim_heap()
    placed = tuple(_placed(placement, copies[placement.node], settings) for placement in placements)
    first = copies[placements[0].node]
    return PlacedModels(placed, lambda: first.info, read.fingerprint(folder))


def _run_there(placement: _Placement, load: Callable[[], DeviceModel[Any]]) -> DeviceModel[Any]:
    """Load where the placement's memory is: the system gives a thread that of its own node."""
    if placement.share is None or placement.share.node == 0:
        return load()
    with ThreadPoolExecutor(1, initializer=placement.share.bind_thread) as executor:
        return executor.submit(copy_context().run, load).result()


def _placed(placement: _Placement, model: DeviceModel[Any], settings: Settings) -> PlacedModel:
    def measure(thoroughly: bool) -> Iterator[Measured | None]:
        for _ in model.capture_graphs_in_steps():
            yield None
        longest_run = math.inf if thoroughly else _LONGEST_RUN
        for budget in probe_in_steps(model, placement.device, longest_run):
            yield None if budget is None else _measured(budget, settings, model.name, placement)

    info: DeviceInfo = replace(describe(placement.device, model.info), name=placement.name)
    bind = None if placement.share is None else placement.share.bind_thread
    return PlacedModel(model, info, measure, memory_freer(placement.device), bind)


def _measured(
    budget: ChosenBudget, settings: Settings, name: str, placement: _Placement
) -> Measured:
    """The measurement of a model, with the token budget of the settings or its own."""
    budget = named_or_chosen(budget, settings.max_batch_tokens)
    log.info(
        "token_budget",
        model=name,
        device=placement.name,
        tokens=budget.tokens,
        reason=budget.reason,
    )
    return Measured(budget.tokens, budget.seconds_per_token)
