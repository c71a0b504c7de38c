"""From settings to warm models: the one entry into this package."""

import torch
import transformers

from app.demo.checkpoint import DEMO_KEY
from app.engine.loading import DeviceInfo, LoadedModels
from app.models.attention import register_attention
from app.models.backbone import Target
from app.models.budget import choose_token_budget
from app.models.checkpoint import Hub, locate, read_config
from app.models.device import choose_device, choose_dtype, describe_device, memory_bytes
from app.models.embedder import load_m3_embedder
from app.settings import Settings


def load(settings: Settings) -> LoadedModels:
    """Load and warm what the settings name; raise `StartupError` for whatever stands in the way."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    target = Target(device, dtype, register_attention(settings.attention, device, dtype))
    folder = locate(settings.embedding_model, _hub(settings))
    embedder = load_m3_embedder(settings.embedding_model, folder, settings.embed_max_length, target)
    probed = choose_token_budget(embedder, device)
    chosen = settings.max_batch_tokens
    return LoadedModels(
        embedder=embedder,
        device=_describe(target),
        max_batch_tokens=probed if chosen == "auto" else chosen,
        demo=read_config(folder).get(DEMO_KEY),
    )


def _hub(settings: Settings) -> Hub:
    return Hub(settings.hub_cache, settings.model_revision, settings.hf_hub_offline)


def _describe(target: Target) -> DeviceInfo:
    return DeviceInfo(
        name=str(target.device),
        description=describe_device(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        attention=target.attention.removeprefix("packed_"),
        gpu_available=target.device.type != "cpu",
        device_count=torch.cuda.device_count(),
        memory_bytes=memory_bytes(target.device),
    )
