"""Loads models for one device, each by its name in a setting."""

from dataclasses import dataclass, fields
from pathlib import Path

import torch

from app.engine.loaded_models import DeviceInfo, ModelInfo
from app.models.backbones.families import is_qwen3, overflows_float16
from app.models.checkpoint.sentence_config import NO_OVERRIDES, SentenceOverrides
from app.models.device.choose import choose_dtype, describe_device, memory_bytes, memory_reader
from app.models.device.memory import ensure_allocates
from app.models.ops.backend import choose_backend
from app.models.ops.proof_cases import ATTENTION
from app.models.target import Target
from app.models.tasks.choose import load_embedder, load_reranker
from app.models.tasks.cross_encoder import CrossEncoder
from app.models.tasks.device_model import EmbeddingModel
from app.models.tasks.qwen3 import QwenReranker
from app.settings import INT8, Settings
from app.settings.model_names import public_name


@dataclass(frozen=True, slots=True)
class DeviceLoader:
    """Loads models for one device."""

    settings: Settings
    device: torch.device
    cpu_threads: int | None = None

    def target_of(self, folder: Path) -> Target:
        """The target of the model in `folder`; the dtype depends on the model."""
        settings = self.settings
        ensure_allocates(self.device)
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
        overrides = overrides_in(settings) if name == settings.dense_model else NO_OVERRIDES
        public, target = public_name(name), self.target_of(folder)
        return load_embedder(public, folder, limit, target, overrides)

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


def overrides_in(settings: Settings) -> SentenceOverrides:
    """What settings say of the model of dense vectors."""
    names = (each.name for each in fields(SentenceOverrides))
    return SentenceOverrides(**{name: getattr(settings, name) for name in names})


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
