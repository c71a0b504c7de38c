"""Pictures in bodies of requests: `{"image": "data:image/png;base64,..."}` in place of a text.

A picture is never fetched from an address. Its base64 is decoded where the picture is.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from smart_embedder.errors import InvalidRequestError
from smart_embedder.requests import ImageInput

_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
_MAX_HEAD = 100


class ImageObject(BaseModel):
    """A picture in place of a text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    image: Annotated[str, Field(description="A data URL in base64: data:image/png;base64,...")]


@dataclass(frozen=True)
class OneError:
    """Reports one error, of the type `kind`, for a value that matches no branch of a union."""

    kind: str
    message: str

    def __get_pydantic_core_schema__(self, source: Any, build: GetCoreSchemaHandler) -> CoreSchema:
        """Wrap the schema of the union."""
        return core_schema.custom_error_schema(
            build(source), self.kind, custom_error_message=self.message
        )


TextOrImage = Annotated[
    str | ImageObject,
    Field(union_mode="left_to_right"),
    OneError("text_or_image", "send a text or a picture"),
]
TextsOrImages = Annotated[list[TextOrImage], FailFast()]


def read_images(items: list[str | ImageObject], field: str) -> list[str | ImageInput]:
    """Replace the pictures among the items of `field` by the engine's inputs.

    Raises `InvalidRequestError` for an image that is an address, or a data URL of another type.
    """
    return [
        item if isinstance(item, str) else read_image(item.image, f"/{field}/{index}")
        for index, item in enumerate(items)
    ]


def read_image(content: str, pointer: str) -> ImageInput:
    """Check the type of a data URL; base64 alone, as Jina's clients send it, has none.

    Raises `InvalidRequestError` for another type, and for an address.
    """
    head, comma, _ = content[:_MAX_HEAD].lower().partition(",")
    kind, *options = head.removeprefix("data:").split(";")
    if not comma and ":" not in head:
        return ImageInput(content)
    if not comma or not head.startswith("data:"):
        message = f"the image at {pointer} must be a data URL: no address is fetched"
    elif kind.replace("jpg", "jpeg") not in _TYPES or "base64" not in options:
        message = f"the data URL at {pointer} must be in base64, of one of {', '.join(_TYPES)}"
    else:
        return ImageInput(content)
    raise InvalidRequestError(message, [{"pointer": pointer, "message": message}])
