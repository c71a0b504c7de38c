"""From settings to warm models."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path

import structlog
import torch
from huggingface_hub.utils.tqdm import disable_progress_bars

from app.engine.download import DownloadStatus
from app.engine.loaded_models import DeviceInfo, LoadedModels, ModelInfo
from app.engine.model import Model
from app.errors import StartupError
from app.models.checkpoint.config import DEMO_KEY, read_config
from app.models.checkpoint.fingerprint import start_fingerprints
from app.models.checkpoint.hub import Hub, local_folder, locate
from app.models.checkpoint.mapped_files import MappedFiles
from app.models.checkpoint.weights import weight_files
from app.models.device.choose import (
    choose_device,
    choose_dtype,
    describe_device,
    memory_bytes,
    memory_freer,
    memory_reader,
)
from app.models.device.cpu_shares import share_cpus
from app.models.device.cpu_threads import run_in_background
from app.models.families import is_qwen3, overflows_float16
from app.models.ops.backend import choose_backend
from app.models.ops.proof_cases import ATTENTION
from app.models.probe import probe, tokens_that_fit, warm_up
from app.models.target import Target
from app.models.tasks.choose import load_embedder, load_reranker
from app.models.tasks.cross_encoder import CrossEncoder
from app.models.tasks.device_model import EmbeddingModel
from app.models.tasks.qwen3 import QwenReranker
from app.models.token_budget import ChosenBudget, capped
from app.settings import INT8, LATE_INTERACTION, NO_RERANKER, Settings
from app.settings.model_names import public_name

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFolders:
    """The folders of the models; None for a model that is not separate."""

    embedding: Path
    dense: Path | None
    reranker: Path | None


def load(settings: Settings, status: DownloadStatus | None = None) -> LoadedModels:
    """Load and warm the models of the settings; raise `StartupError` if one cannot be loaded.

    `status` shows a running download.
    """
    # It would log every retry; a failure becomes one `StartupError`.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    disable_progress_bars()
    warnings.filterwarnings("ignore", module="huggingface_hub")
    if settings.torch_compile:
        log.warning("torch_compile_has_no_effect", reason="kernels of the service took its place")
    folders = locate_models(settings, status)
    files = MappedFiles(_files_of(settings, folders))
    cached = (folders.embedding, folders.dense) if settings.caches_embeddings else ()
    fingerprints = start_fingerprints([folder for folder in cached if folder is not None])
    first, *others = _load_workers(settings, folders)
    embedders: list[Model] = [each for each in (first.embedder, first.dense) if each is not None]
    prints = dict(zip(embedders, fingerprints(), strict=False))
    files.require_unchanged()
    _finish_in_background([first, *others], files)
    return replace(first, files=files, replicas=tuple(others), fingerprints=prints)


def locate_models(settings: Settings, status: DownloadStatus | None = None) -> ModelFolders:
    """Find the models, each in its own revision; download those that are not on the disk."""
    # Made only where it is needed: without a home folder there is no cache.
    hub = partial(_hub, settings, status or DownloadStatus())
    return ModelFolders(
        _locate(settings.embedding_model, settings.model_revision, hub),
        _locate_unless(
            {settings.embedding_model}, settings.dense_model, settings.dense_model_revision, hub
        ),
        _locate_unless(
            {LATE_INTERACTION, NO_RERANKER},
            settings.reranker_model,
            settings.reranker_model_revision,
            hub,
        ),
    )


def locate_model(
    name: str, revision: str | None, settings: Settings, status: DownloadStatus
) -> Path:
    """Find a model by its name in a setting; download it if it is not on the disk."""
    return _locate(name, revision, partial(_hub, settings, status))


def _hub(settings: Settings, status: DownloadStatus, revision: str | None) -> Hub:
    return Hub(settings.hub_cache, revision, settings.hf_hub_offline, status)


def _locate_unless(
    no_models: set[str], name: str, revision: str | None, hub: Callable[[str | None], Hub]
) -> Path | None:
    """The folder of the model `name`, or None if the name is in `no_models`."""
    if name not in no_models:
        return _locate(name, revision, hub)
    _warn_of_revision(name, revision)
    return None


def _locate(name: str, revision: str | None, hub: Callable[[str | None], Hub]) -> Path:
    folder = local_folder(name)
    if not folder.is_dir():
        return locate(name, hub(revision))
    _warn_of_revision(name, revision)
    return folder


def _warn_of_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        log.warning("revision_not_used", model=public_name(name), revision=revision)


def _files_of(settings: Settings, folders: ModelFolders) -> Iterator[tuple[str, Path]]:
    """The files of weights, each with its name in messages."""
    names = (settings.embedding_model, settings.dense_model, settings.reranker_model)
    for name, folder in zip(names, astuple(folders), strict=True):
        if folder is not None:
            with suppress(OSError, ValueError, KeyError):  # Loading raises the error.
                for path in weight_files(folder):
                    yield f"{public_name(name)}/{path.name}", path


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
            on_node[share.node] = share.run(load)
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


def _finish_in_background(loaded: list[LoadedModels], files: MappedFiles) -> None:
    """Finish loading while the first requests are served.

    The thread is no daemon: Python may crash if it exits while a daemon is inside PyTorch.
    """

    def finish() -> None:
        for models in loaded:
            for model in models.each:
                model.finish_loading()
        files.forget_unmapped()

    run_in_background(finish, "finish-loading", daemon=False)


def _budget(
    settings: Settings, embedder: EmbeddingModel, others: Sequence[Model], device: torch.device
) -> ChosenBudget:
    """Warm up every model, and choose and log the token budget."""
    budget = probe(embedder, device)
    for other in others:
        warm_up(other)
        budget = capped(budget, tokens_that_fit(other, device))
    if settings.max_batch_tokens != "auto":
        budget = replace(budget, tokens=settings.max_batch_tokens, reason="MAX_BATCH_TOKENS")
    log.info("token_budget", tokens=budget.tokens, reason=budget.reason)
    return budget


@dataclass(frozen=True, slots=True)
class DeviceLoader:
    """Loads models for one device."""

    settings: Settings
    device: torch.device
    cpu_threads: int | None = None

    def target_of(self, folder: Path) -> Target:
        """The target of the model in `folder`; the dtype depends on the model."""
        settings = self.settings
        dtype = choose_dtype(settings.dtype, self.device, qwen=overflows_float16(folder))
        backend = choose_backend(self.device, dtype, settings.attention)
        return Target(
            self.device,
            dtype,
            backend,
            quantized=settings.dtype == INT8,
            attention_named=settings.attention != "auto",
            cpu_threads=self.cpu_threads,
        )

    def load_embedder(self, name: str, folder: Path) -> EmbeddingModel:
        """The embedding model of that name in a setting."""
        settings = self.settings
        limit = settings.qwen_embed_max_length if is_qwen3(folder) else settings.embed_max_length
        pooling = settings.pooling if name == settings.dense_model else None
        public, target = public_name(name), self.target_of(folder)
        return load_embedder(public, folder, limit, target, pooling=pooling)

    def load_dense(self, folder: Path | None) -> EmbeddingModel | None:
        """The separate model for dense vectors; None without one."""
        return None if folder is None else self.load_embedder(self.settings.dense_model, folder)

    def load_reranker(self, folder: Path | None) -> CrossEncoder | QwenReranker | None:
        """The reranker; None if it is no separate model."""
        if folder is None:
            return None
        return self.load_reranker_named(self.settings.reranker_model, folder)

    def load_reranker_named(self, name: str, folder: Path) -> CrossEncoder | QwenReranker:
        """The reranker of that name in a setting."""
        settings = self.settings
        limit = settings.bge_rerank_max_length
        if is_qwen3(folder):
            limit = settings.qwen_rerank_max_length
        return load_reranker(
            public_name(name),
            folder,
            limit,
            self.target_of(folder),
            max_qwen_pairs=settings.qwen_rerank_batch_size,
        )


def describe(device: torch.device, model: ModelInfo) -> DeviceInfo:
    """The hardware, with the number format and the attention of a model on it."""
    return DeviceInfo(
        name=str(device),
        description=describe_device(device),
        dtype=model.dtype,
        attention=model.paths[ATTENTION],
        gpu_available=device.type != "cpu",
        device_count=torch.cuda.device_count(),
        memory_bytes=memory_bytes(device),
        read_memory=memory_reader(device),
    )
