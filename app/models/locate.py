"""The folders of the models that the settings name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from app.engine.download import DownloadStatus
from app.models.checkpoint.hub import Hub, local_folder, locate
from app.settings import LATE_INTERACTION, NO_RERANKER, Settings
from app.settings.model_names import public_name

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFolders:
    """The folders of the models; None for a model that is not separate."""

    embedding: Path
    dense: Path | None
    reranker: Path | None


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
