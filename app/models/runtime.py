"""From settings to warm models: the one entry into this package."""

import logging
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import torch
from huggingface_hub.utils.tqdm import disable_progress_bars

from app.background import run_in_background
from app.demo.checkpoint import DEMO_KEY
from app.engine.loading import DeviceInfo, LoadedModels
from app.jobs import Embedder, Model, Reranker
from app.model_names import public_name
from app.models.attention import choose_attention
from app.models.backbone import Target
from app.models.budget import ChosenBudget, at_most
from app.models.checkpoint import Hub, locate, read_config
from app.models.compiled import explained
from app.models.cross_encoder import load_cross_encoder
from app.models.device import (
    choose_device,
    choose_dtype,
    describe_device,
    memory_bytes,
    memory_freer,
    memory_reader,
)
from app.models.embedder import M3Embedder, load_m3_embedder
from app.models.probe import probe, tokens_that_fit, warm_up
from app.models.qwen import load_qwen_embedder, load_qwen_reranker
from app.settings import INT8, LATE_INTERACTION, NO_RERANKER, Settings

log = structlog.get_logger(__name__)


def load(settings: Settings) -> LoadedModels:
    """Load and warm what the settings name; raise `StartupError` for whatever stands in the way."""
    # It would report every retry itself; what came of them is one sentence of ours.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    disable_progress_bars()
    warnings.filterwarnings("ignore", module="huggingface_hub")
    first, *others = [_load_on(name, settings) for name in settings.devices]
    return replace(first, replicas=tuple(others))


def _load_on(device: str, settings: Settings) -> LoadedModels:
    target = _choose_target(device, settings)
    loader = _Loader(settings, target)
    folder = loader.locate(settings.embedding_model)
    name = public_name(settings.embedding_model)
    embedder = load_m3_embedder(name, folder, settings.embed_max_length, target)
    dense, reranker = loader.load_dense(), loader.load_reranker()
    with explained():
        budget = _budget(settings, embedder, [dense, reranker], target.device)
    _settle_beside([embedder, dense, reranker])
    return LoadedModels(
        embedder=embedder,
        device=_describe(target),
        max_batch_tokens=budget.tokens,
        dense=dense,
        reranker=reranker,
        late_interaction=settings.reranker_model == LATE_INTERACTION,
        demo=read_config(folder).get(DEMO_KEY),
        seconds_per_token=budget.seconds_per_token,
        free_memory=memory_freer(target.device),
    )


def _settle_beside(models: list[Model | None]) -> None:
    """Finish the loading while the first requests come.

    The thread is no daemon, as the device's is: an interpreter that ends while such a thread is
    inside PyTorch may crash.
    """

    def settle() -> None:
        for model in models:
            if model is not None:
                model.settle()

    run_in_background(settle, "settle", daemon=False)


def _budget(
    settings: Settings, embedder: M3Embedder, others: list[Model | None], device: torch.device
) -> ChosenBudget:
    """Warm every model up, and say what one forward may hold and why."""
    budget = probe(embedder, device)
    for other in others:
        if other is not None:
            warm_up(other)
            budget = at_most(budget, tokens_that_fit(other, device))
    if settings.max_batch_tokens != "auto":
        budget = replace(budget, tokens=settings.max_batch_tokens, reason="MAX_BATCH_TOKENS")
    log.info("token_budget", tokens=budget.tokens, reason=budget.reason)
    return budget


@dataclass(frozen=True, slots=True)
class _Loader:
    """Finds and loads the models that stand beside bge-m3."""

    settings: Settings
    target: Target

    def locate(self, name: str) -> Path:
        return locate(name, hub_for(name, self.settings))

    def load_dense(self) -> Embedder | None:
        """The dense model, where it is not bge-m3 itself."""
        name = self.settings.dense_model
        if name == self.settings.embedding_model:
            return None
        limit = self.settings.qwen_embed_max_length
        return load_qwen_embedder(public_name(name), self.locate(name), limit, self.target)

    def load_reranker(self) -> Reranker | None:
        """The reranker, where it is a model of its own."""
        settings = self.settings
        if settings.reranker_model in {LATE_INTERACTION, NO_RERANKER}:
            return None
        folder, name = self.locate(settings.reranker_model), public_name(settings.reranker_model)
        if read_config(folder).get("model_type") != "qwen3":
            return load_cross_encoder(name, folder, settings.bge_rerank_max_length, self.target)
        limit, batch = settings.qwen_rerank_max_length, settings.qwen_rerank_batch_size
        return load_qwen_reranker(name, folder, limit, batch, self.target)


def hub_for(name: str, settings: Settings) -> Hub:
    """How the model `name` is fetched; MODEL_REVISION is one of EMBEDDING_MODEL's."""
    revision = settings.model_revision if name == settings.embedding_model else None
    return Hub(settings.hub_cache, revision, settings.hf_hub_offline)


def _choose_target(name: str, settings: Settings) -> Target:
    device = choose_device(name)
    dtype = choose_dtype(settings.dtype, device)
    attention = choose_attention(settings.attention, device, dtype)
    return Target(
        device,
        dtype,
        attention,
        quantized=settings.dtype == INT8,
        compiled=settings.torch_compile,
    )


def _describe(target: Target) -> DeviceInfo:
    return DeviceInfo(
        name=str(target.device),
        description=describe_device(target.device),
        dtype=INT8 if target.quantized else str(target.dtype).removeprefix("torch."),
        attention=target.attention,
        gpu_available=target.device.type != "cpu",
        device_count=torch.cuda.device_count(),
        memory_bytes=memory_bytes(target.device),
        read_memory=memory_reader(target.device),
    )
