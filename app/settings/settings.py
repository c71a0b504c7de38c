"""The settings of a service: the declared ones, checks of several, and derived values."""

from pathlib import Path

from pydantic import model_validator

from app.errors import StartupError
from app.settings.declaration import DeclaredSettings
from app.settings.types import IN_MEMORY, INT8, LATE_INTERACTION, OFF


class Settings(DeclaredSettings):
    """The settings of a service or of an engine; None is a setting that is not set.

    Reads no sources: `app.settings.sources.load_settings` reads flags, the environment and .env.
    Raises `ValueError` for a name that is no setting and for a value that is not allowed.
    """

    @model_validator(mode="after")
    def _agree(self) -> "Settings":
        if self.dtype == "float16" and self.device.startswith("cpu"):
            raise ValueError("DTYPE=float16 is for GPUs; on a CPU use bfloat16 or float32")
        if self.dtype == INT8 and self.device.startswith(("cuda", "mps")):
            raise ValueError(f"DTYPE=int8 is for CPUs; with DEVICE={self.device} use auto")
        if self.rerank_gpu_timeout >= self.request_timeout:
            raise ValueError(
                f"RERANK_GPU_TIMEOUT={self.rerank_gpu_timeout:g} must be below "
                f"REQUEST_TIMEOUT={self.request_timeout:g}"
            )
        return self

    @property
    def devices(self) -> list[str]:
        """The devices by name, one worker each."""
        return list(dict.fromkeys(name.strip() for name in self.device.split(",")))

    @property
    def dense_model(self) -> str:
        """The model that makes dense vectors."""
        return self.dense_embedding_model or self.embedding_model

    @property
    def reranker_name(self) -> str:
        """The model that scores passages."""
        if self.reranker_model == LATE_INTERACTION:
            return self.embedding_model
        return self.reranker_model

    @property
    def shared_rate_limit_store(self) -> str | None:
        """The address of the Redis that replicas share; None where each counts for itself."""
        store = self.rate_limit_store.get_secret_value()
        return None if store == IN_MEMORY else store

    @property
    def caches_embeddings(self) -> bool:
        """Whether vectors are kept."""
        return self.embedding_cache.get_secret_value() != OFF

    @property
    def shared_embedding_cache(self) -> str | None:
        """The address of the Redis that processes share vectors through; None without one."""
        store = self.embedding_cache.get_secret_value()
        return None if store in {OFF, IN_MEMORY} else store

    @property
    def embed_max_length(self) -> int:
        """Token limit of bge-m3: BGE_EMBED_MAX_LENGTH, else the older MAX_INPUT_LENGTH."""
        return self.bge_embed_max_length or self.max_input_length

    @property
    def hub_cache(self) -> Path:
        """The folder of downloaded models; raises `StartupError` if the user has no home folder."""
        try:
            return self.hf_home.expanduser() / "hub"
        except RuntimeError as error:
            raise StartupError(
                f"HF_HOME={self.hf_home} cannot be found: this user has no home folder; set "
                "HF_HOME to a folder for downloaded models"
            ) from error
