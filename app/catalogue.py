"""The served models, and the names by which clients may ask for them."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from app.errors import UnknownModelError
from app.logs import escape_text
from app.settings import Settings
from smart_embedder.errors import StartupError
from smart_embedder.settings import LATE_INTERACTION

_MAX_QUOTED = 100
# Some clients list only models whose names contain this.
_EMBED = "embed"


class Role(Enum):
    """The use of a model: for all kinds of vectors, only for dense ones, for scores, or for spans.

    The value is its field of `LoadedModels`.
    """

    EMBEDDER = "embedder"
    DENSE = "dense"
    RERANKER = "reranker"
    EXTRACTOR = "extractor"

    @classmethod
    def of(cls, task: str) -> "Role":
        """The role of a model of MODELS with this task."""
        return {"embed": cls.EMBEDDER, "rerank": cls.RERANKER, "extract": cls.EXTRACTOR}[task]

    @property
    def task(self) -> str:
        """The task of models with this role."""
        return {Role.RERANKER: "rerank", Role.EXTRACTOR: "extract"}.get(self, "embed")

    @property
    def embeds(self) -> bool:
        """Whether models with this role make vectors."""
        return self in {Role.EMBEDDER, Role.DENSE}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model with all its names; responses show the first one.

    `from_models_file` marks a model of MODELS. `revision` is the value of its setting, if any.
    """

    role: Role
    names: tuple[str, ...]
    from_models_file: bool = False
    revision: str | None = None

    @property
    def name(self) -> str:
        """The name that responses and the engine use."""
        return self.names[0]

    def is_called(self, name: str) -> bool:
        """Whether this is one of its names, in upper or lower case."""
        # Checked first, because a body may hold a name of megabytes; folding a character makes
        # three at most.
        may_match = len(name) <= 3 * max(map(len, self.names))
        return may_match and name.casefold() in map(str.casefold, self.names)


class ModelCatalogue:
    """Finds models by name, whether they are loaded yet or not.

    Raises `StartupError` if MODEL_ALIASES names a model that is not served, if a model of MODELS
    has a name of a default model, or if both default embedding models have the same name.
    """

    def __init__(self, settings: Settings) -> None:
        self.created = int(time.time())
        aliases, entries = settings.model_aliases or {}, settings.models or ()
        served = list(_default_models(settings))
        embedder, dense, _ = settings.default_entries
        if dense is not None and dense.public_name == embedder.public_name:
            raise StartupError(
                f"EMBEDDING_MODEL and DENSE_EMBEDDING_MODEL have one name, {dense.public_name}: "
                "rename a folder, or leave out DENSE_EMBEDDING_MODEL if they are one model"
            )
        for entry in entries:
            for name in (entry.public_name, *entry.aliases):
                if any(model.is_called(name) for model in served):
                    raise StartupError(
                        f"{entry.location}: {name} is already a name of a default model"
                    )
        for entry in entries:
            role = Role.of(entry.task)
            names = tuple(dict.fromkeys((*_public_names(role, entry.public_name), *entry.aliases)))
            served.append(ServedModel(role, names, from_models_file=True, revision=entry.revision))
        self.models = tuple(_with_aliases(model, aliases) for model in served)
        for alias, target in aliases.items():
            if not any(model.is_called(target) for model in served):
                raise StartupError(
                    f"MODEL_ALIASES={alias}={target} is not allowed: the models that are served "
                    f"are {_listed(self.models)}"
                )
        embedders = [model for model in self.models if model.role.embeds]
        self._embedders = sorted(embedders, key=lambda model: model.role is Role.EMBEDDER)
        scorer = Role.EMBEDDER if settings.reranker_model == LATE_INTERACTION else Role.RERANKER
        # The default reranker, if there is one, is the first.
        self._rerankers = [
            model
            for model in self.models
            if model.role is (Role.RERANKER if model.from_models_file else scorer)
        ]

    def embedder(self, name: str | None) -> ServedModel:
        """The embedding model with this name, or the default model of dense vectors."""
        return _find(name, self._embedders, "embedding models")

    def reranker(self, name: str | None) -> ServedModel | None:
        """The reranker with this name, or the default one; None if there is no reranker."""
        if not (name and self._rerankers):
            return next((model for model in self._rerankers if not model.from_models_file), None)
        return _find(name, self._rerankers, "rerankers")

    def extractor(self, name: str | None) -> ServedModel:
        """The model for spans with this name, or the first of MODELS."""
        extractors = [model for model in self.models if model.role is Role.EXTRACTOR]
        return _find(name, extractors, "models with the task extract")

    def find(self, name: str | None) -> ServedModel:
        """The model with this name, or the default model of dense vectors."""
        return self._embedders[0] if name is None else _find(name, self.models, "models")

    def with_role(self, role: Role) -> ServedModel:
        """The first model with this role; there is always an embedder."""
        return next(model for model in self.models if model.role is role)

    def reranks(self, model: ServedModel) -> bool:
        """Whether the model can score passages."""
        return model in self._rerankers


def _default_models(settings: Settings) -> Iterator[ServedModel]:
    """The default models, which EMBEDDING_MODEL and the like name."""
    roles = (Role.EMBEDDER, Role.DENSE, Role.RERANKER)
    for role, entry in zip(roles, settings.default_entries, strict=True):
        if entry is not None:
            names = tuple(_public_names(role, entry.public_name))
            yield ServedModel(role, names, revision=entry.revision)


def _public_names(role: Role, name: str) -> Iterator[str]:
    """The name, its last part, and for an embedding model a name that contains `embed`."""
    last = name.rpartition("/")[2]
    yield name
    if last != name:
        yield last
    if role.embeds and _EMBED not in name.lower():
        yield f"{last}-{_EMBED}"


def _with_aliases(model: ServedModel, aliases: dict[str, str]) -> ServedModel:
    further = (alias for alias, target in aliases.items() if model.is_called(target))
    return replace(model, names=tuple(dict.fromkeys((*model.names, *further))))


def _find(name: str | None, models: Sequence[ServedModel], what: str) -> ServedModel:
    """Find the model with this name, or the first without a name; raise `UnknownModelError`."""
    if not models:
        raise UnknownModelError(f"no {what} are served here: add one to MODELS")
    if not name:
        return models[0]
    for model in models:
        if model.is_called(name):
            return model
    raise UnknownModelError(
        f"the model {escape_text(name, _MAX_QUOTED)} is not served here: the {what} are "
        f"{_listed(models)} (MODEL_ALIASES adds names)"
    )


def _listed(models: Sequence[ServedModel]) -> str:
    return ", ".join(name for model in models for name in model.names)
