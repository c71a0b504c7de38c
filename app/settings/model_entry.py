"""A model beside those that have settings of their own: an entry of the file MODELS."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from app.settings import types
from app.settings.model_names import public_name
from app.settings.types import Allowed

_Name = Annotated[str, Field(min_length=1, strict=True)]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class ModelEntry(BaseModel):
    """One model of the file; None stands for the value of the setting of that name.

    `location` is its file and line, for messages.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: types.EmbeddingModel
    task: Literal["embed", "rerank"] = "embed"
    aliases: Annotated[
        tuple[_Name, ...], BeforeValidator(_as_list), Allowed("a name, or a list of names")
    ] = ()
    revision: Annotated[_Name | None, Allowed("a branch, tag or commit, in quotes")] = None
    device: types.DeviceNames | None = None
    dtype: types.Dtype | None = None
    max_length: types.Tokens | None = None
    pooling: types.Pooling | None = None
    normalize: Annotated[bool | None, Field(strict=True)] = None
    query_prompt: types.Prompt | None = None
    document_prompt: types.Prompt | None = None
    load: Literal["start", "first_use"] = "first_use"
    pinned: Annotated[bool, Field(strict=True)] = False
    location: str = "MODELS"

    @property
    def public_name(self) -> str:
        """The name that answers carry: its hub id, or the last part of its folder's path."""
        return public_name(self.name)
