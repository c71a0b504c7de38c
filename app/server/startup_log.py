"""The log lines of a start, for which people and scripts wait."""

import structlog

from app.engine.loaded_models import LoadedModels
from app.engine.model import Model
from app.errors import StartupError
from app.settings.sources import misspelt_names

log = structlog.get_logger(__name__)


def log_ready(models: LoadedModels, url: str | None = None) -> None:
    """Log that the service is ready, with the limits in force, and its `url` if that is known."""
    reranker = models.embedder if models.late_interaction else models.reranker
    if reranker is not None:
        log.info("Reranker ready.", **_limits(reranker))
    if models.demo:
        log.warning("demo_model", note=models.demo)
    log.info(
        "Server ready to accept requests",
        **({} if url is None else {"url": url}),
        **_limits(models.embedder),
        device=models.device.description,
        dtype=models.device.dtype,
        attention=models.device.attention,
        max_batch_tokens=models.max_batch_tokens,
    )


def _limits(model: Model) -> dict[str, str | int]:
    """The model's name and its limits in force, which may be lower than the settings."""
    limits: dict[str, str | int] = {"model": model.name, "max_length": model.max_length}
    if model.max_batch_sequences is not None:
        limits["max_pairs_in_forward"] = model.max_batch_sequences
    return limits


def warn_of_misspelt_names() -> None:
    """Warn of environment variables whose names are close to a setting's."""
    for name, setting in misspelt_names():
        log.warning("unknown_setting", name=name, nearest=setting)


def log_failure(error: Exception) -> None:
    """Log why the start failed; the last line holds the reason."""
    reason = str(error)
    if not isinstance(error, StartupError):
        first_line = reason.partition("\n")[0]
        reason = f"unexpected error while loading: {type(error).__name__}: {first_line}"
        log.error("unexpected_error", exc_info=error)
    log.error("start_failed", reason=reason)
