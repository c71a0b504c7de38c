"""What the log says of a start: the lines that people and scripts wait for."""

import structlog

from app.engine.loaded_models import LoadedModels
from app.engine.types import Model
from app.errors import StartupError
from app.settings.sources import misspelt_names

log = structlog.get_logger(__name__)


def announce(models: LoadedModels, url: str | None = None) -> None:
    """Log that the service is ready, with the limits in force; `url` where that is known."""
    reranker = models.embedder if models.late_interaction else models.reranker
    if reranker is not None:
        log.info("Reranker ready.", **_limits(reranker))
    if models.demo:
        log.warning("demo_model", note=models.demo)
    where = {} if url is None else {"url": url}
    log.info(
        "Server ready to accept requests",
        **where,
        **_limits(models.embedder),
        device=models.device.description,
        dtype=models.device.dtype,
        attention=models.device.attention,
        max_batch_tokens=models.max_batch_tokens,
    )


def _limits(model: Model) -> dict[str, str | int]:
    """Its name, and the limits in force for it: they may be lower than the settings."""
    limits: dict[str, str | int] = {"model": model.name, "max_length": model.max_length}
    if model.max_batch_sequences is not None:
        limits["max_pairs_in_forward"] = model.max_batch_sequences
    return limits


def warn_of_misspelt_names() -> None:
    """Say which variables may have been meant for settings."""
    for name, setting in misspelt_names():
        log.warning("unknown_setting", name=name, nearest=setting)


def report_failure(error: Exception) -> None:
    """Log why the start failed; the line with the reason is the last."""
    reason = str(error)
    if not isinstance(error, StartupError):
        first_line = reason.partition("\n")[0]
        reason = f"unexpected error while loading: {type(error).__name__}: {first_line}"
        log.error("unexpected_error", exc_info=error)
    log.error("start_failed", reason=reason)
