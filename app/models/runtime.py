"""From settings to warm models."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextvars import copy_context
from dataclasses import replace
from functools import partial

import structlog
import torch
from huggingface_hub.utils.tqdm import disable_progress_bars

from app.engine.download import DownloadStatus
from app.engine.loaded_models import LoadedModels
from app.engine.model import Model
from app.errors import StartupError
from app.models.checkpoint.config import DEMO_KEY, read_config
from app.models.checkpoint.heap import trim_heap
from app.models.checkpoint.reading import reading
from app.models.device.choose import choose_device, memory_freer
from app.models.device.cpu_shares import share_cpus
from app.models.device_loader import DeviceLoader, describe
from app.models.locate import ModelFolders, locate_models
from app.models.probe import probe, tokens_that_fit, warm_up
from app.models.tasks.device_model import EmbeddingModel
from app.models.token_budget import ChosenBudget, capped, named_or_chosen
from app.settings import LATE_INTERACTION, Settings

log = structlog.get_logger(__name__)


def load(
    settings: Settings, status: DownloadStatus | None = None, *, with_digests: bool = False
) -> LoadedModels:
    """Load and warm the models of the settings; raise `StartupError` if one cannot be loaded.

    `status` shows a running download. `with_digests` makes fingerprints also where no cache needs
    them.
    """
    # It would log every retry; a failure becomes one `StartupError`.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    disable_progress_bars()
    warnings.filterwarnings("ignore", module="huggingface_hub")
    if settings.torch_compile:
        log.warning("torch_compile_has_no_effect", reason="kernels of the service took its place")
    folders = locate_models(settings, status)
    with reading(with_digests=with_digests or settings.caches_embeddings) as read:
        first, *others = _load_workers(settings, folders)
    trim_heap()
    embedders = ((first.embedder, folders.embedding), (first.dense, folders.dense))
    prints: dict[Model, str] = {
        model: read.fingerprint(folder)
        for model, folder in embedders
        if model is not None and folder is not None
    }
    return replace(first, replicas=tuple(others), fingerprints=prints)


def _load_workers(settings: Settings, folders: ModelFolders) -> list[LoadedModels]:
    if settings.device.startswith("cpu:") and len(settings.devices) > 1:
        return list(_load_cpu_workers(settings, folders))
    return [_load_on(name, settings, folders) for name in settings.devices]


def _load_cpu_workers(settings: Settings, folders: ModelFolders) -> Iterator[LoadedModels]:
    """Load for several workers; those on one memory node share the models."""
    shares = share_cpus(settings.devices)
    on_node: dict[int, LoadedModels] = {}
    for share in shares:
        if share.node not in on_node:
            load = partial(_load_on, share.name, settings, folders, share.threads)
            on_node[share.node] = share.run(partial(copy_context().run, load))
        models = on_node[share.node]
        description = f"{models.device.description}, shared by {len(shares)} workers"
        device = replace(models.device, name=share.name, description=description)
        yield replace(models, device=device, prepare_thread=share.bind_thread)


def _load_on(
    name: str, settings: Settings, folders: ModelFolders, cpu_threads: int | None = None
) -> LoadedModels:
    device = choose_device(name)
    loader = DeviceLoader(settings, device, cpu_threads)
    embedder = loader.load_embedder(settings.embedding_model, folders.embedding)
    dense, reranker = loader.load_dense(folders.dense), loader.load_reranker(folders.reranker)
    _require_dense(dense)
    models = [each for each in (embedder, dense, reranker) if each is not None]
    for model in models:
        model.capture_graphs()
    budget = _budget(settings, embedder, models[1:], device)
    return LoadedModels(
        embedder=embedder,
        device=describe(device, embedder.info),
        infos=tuple(each.info for each in models),
        max_batch_tokens=budget.tokens,
        dense=dense,
        reranker=reranker,
        late_interaction=settings.reranker_model == LATE_INTERACTION,
        demo=read_config(folders.embedding).get(DEMO_KEY),
        seconds_per_token=budget.seconds_per_token,
        free_memory=memory_freer(device),
    )


def _require_dense(model: EmbeddingModel | None) -> None:
    """Raise `StartupError` if the model for dense vectors makes none."""
    if model is not None and not model.kinds.dense:
        raise StartupError(f"DENSE_EMBEDDING_MODEL={model.name} makes no dense vectors")


def _budget(
    settings: Settings, embedder: EmbeddingModel, others: Sequence[Model], device: torch.device
) -> ChosenBudget:
    """Warm up every model, and choose and log the token budget."""
    budget = probe(embedder, device)
    for other in others:
        warm_up(other)
        budget = capped(budget, tokens_that_fit(other, device))
    budget = named_or_chosen(budget, settings.max_batch_tokens)
    log.info("token_budget", tokens=budget.tokens, reason=budget.reason)
    return budget
