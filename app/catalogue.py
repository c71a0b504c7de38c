"""The models that are served, with every name by which a client may ask for them."""

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
# Some clients list only models whose name has this in it.
_EMBED = "embed"


class Role(Enum):
    """What a model is used for: all kinds of vectors, only dense ones, or scores.

    The value is its field of `LoadedModels`.
    """

    EMBEDDER = "embedder"
    DENSE = "dense"
    RERANKER = "reranker"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model with all its names; answers carry the first one.

    `further` marks a model of MODELS. `revision` is the setting's value, if it is set.
    """

    role: Role
    names: tuple[str, ...]
    further: bool = False
    revision: str | None = None

    @property
    def name(self) -> str:
        """The name that answers carry, and that the engine knows it by."""
        return self.names[0]

    def is_called(self, name: str) -> bool:
        """Whether this is one of its names, in upper or lower case."""
        # Folding makes three characters of one at most, and a body may hold a name of megabytes.
        may_be = len(name) <= 3 * max(map(len, self.names))
        return may_be and name.casefold() in map(str.casefold, self.names)


class ModelCatalogue:
    """Finds models by name, whether they are loaded yet or not.

    Raises `StartupError` where MODEL_ALIASES names a model that is not served, where a model of
    MODELS has a name of another, and where both models that embed by default have one.
    """

    def __init__(self, settings: Settings) -> None:
        self.created = int(time.time())
        aliases, entries = settings.model_aliases or {}, settings.models or ()
        own = list(_defaults(settings))
        embedder, dense, _ = settings.default_entries
        if dense is not None and dense.public_name == embedder.public_name:
            raise StartupError(
                f"EMBEDDING_MODEL and DENSE_EMBEDDING_MODEL have one name, {dense.public_name}: "
                "rename a folder, or leave out DENSE_EMBEDDING_MODEL if they are one model"
            )
        for entry in entries:
            for name in (entry.public_name, *entry.aliases):
                if any(model.is_called(name) for model in own):
                    raise StartupError(
                        f"{entry.location}: {name} is a name of a model that has a setting of its "
                        "own"
                    )
        for entry in entries:
            role = Role.EMBEDDER if entry.task == "embed" else Role.RERANKER
            names = tuple(dict.fromkeys((*_own_names(role, entry.public_name), *entry.aliases)))
            own.append(ServedModel(role, names, further=True, revision=entry.revision))
        self.models = tuple(_with_aliases(model, aliases) for model in own)
        for alias, target in aliases.items():
            if not any(model.is_called(target) for model in own):
                raise StartupError(
                    f"MODEL_ALIASES={alias}={target} is not allowed: the models that are served "
                    f"are {_listed(self.models)}"
                )
        embedders = [each for each in self.models if each.role is not Role.RERANKER]
        self._embedders = sorted(embedders, key=lambda each: each.role is Role.EMBEDDER)
        scorer = Role.EMBEDDER if settings.reranker_model == LATE_INTERACTION else Role.RERANKER
        # The default one, if there is one, is the first.
        self._rerankers = [
            each for each in self.models if each.role is (Role.RERANKER if each.further else scorer)
        ]

    def embedder(self, name: str | None) -> ServedModel:
        """The embedding model of that name, or the one that makes dense vectors by default."""
        return _find(name, self._embedders, "embedding models")

    def reranker(self, name: str | None) -> ServedModel | None:
        """The reranker of that name, or the default one; None if there is no reranker."""
        if not (name and self._rerankers):
            return next((each for each in self._rerankers if not each.further), None)
        return _find(name, self._rerankers, "rerankers")

    def find(self, name: str | None) -> ServedModel:
        """The model of that name, or the one that makes dense vectors by default."""
        return self._embedders[0] if name is None else _find(name, self.models, "models")

    def with_role(self, role: Role) -> ServedModel:
        """The first model with this role; there is always an embedder."""
        return next(model for model in self.models if model.role is role)

    def reranks(self, model: ServedModel) -> bool:
        """Whether it scores passages."""
        return model in self._rerankers


def _defaults(settings: Settings) -> Iterator[ServedModel]:
    """The models that have settings of their own."""
    for role, entry in zip(Role, settings.default_entries, strict=True):
        if entry is not None:
            names = tuple(_own_names(role, entry.public_name))
            yield ServedModel(role, names, revision=entry.revision)


def _own_names(role: Role, name: str) -> Iterator[str]:
    """Its hub id, the last part of that, and for an embedding model a name with `embed` in it."""
    last = name.rpartition("/")[2]
    yield name
    if last != name:
        yield last
    if role is not Role.RERANKER and _EMBED not in name.lower():
        yield f"{last}-{_EMBED}"


def _with_aliases(model: ServedModel, aliases: dict[str, str]) -> ServedModel:
    further = (alias for alias, target in aliases.items() if model.is_called(target))
    return replace(model, names=tuple(dict.fromkeys((*model.names, *further))))


def _find(name: str | None, models: Sequence[ServedModel], what: str) -> ServedModel:
    """The model of that name, or the first one; raises `UnknownModelError`."""
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
