"""Models of transformers with a head, whose result for a text is the state of each of its tokens.

So they are loaded, proven and run as any module.
"""

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from smart_embedder.kernels.packed_batch import PackedBatch

# What a classifier labels.
Classified = Literal["sequences", "tokens"]


class HeadedModule(nn.Module):
    """A model with a head. `body` is the part whose products may be computed in 8 bits."""

    _supports_attention_backend = False  # Packed, a head would read the tokens of other texts.
    body: Any
    config: Any


class Classifier(HeadedModule):
    """A classifier; all tokens of a sequence have its logits, unless it labels tokens.

    With `marks_segments` it reads which tokens are of the second text of a pair.
    """

    def __init__(self, classifier: Any, *, marks_segments: bool) -> None:
        super().__init__()
        self.classifier, self.config = classifier, classifier.config
        takes_segments = "token_type_ids" in inspect.signature(classifier.forward).parameters
        self.marks_segments = marks_segments and takes_segments

    @property
    def body(self) -> Any:
        """The module without its head."""
        return self.classifier.base_model

    def forward(self, input_ids: Tensor, **options: Tensor) -> BaseModelOutput:
        """Compute `[N, L, labels]` from `input_ids` `[N, L]`."""
        logits = self.classifier(input_ids=input_ids, **options).logits
        if logits.dim() == 2:  # noqa: PLR2004 - of sequences
            logits = logits[:, None].expand(-1, input_ids.shape[1], -1)
        return BaseModelOutput(logits)


class TextTower(HeadedModule):
    """The texts of a model that projects texts and pictures into one space."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.whole, self.config = whole, whole.config.text_config

    @property
    def body(self) -> Any:
        """The part that reads texts; pictures are computed by transformers' own modules."""
        return find_text_part(self.whole)

    def forward(self, input_ids: Tensor, **options: Tensor) -> BaseModelOutput:
        """Compute `[N, L, width]` from `input_ids` `[N, L]`."""
        found = self.whole.get_text_features(input_ids=input_ids, **options)
        return BaseModelOutput(found.pooler_output[:, None].expand(-1, input_ids.shape[1], -1))

    def encode_images(self, arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[Tensor, int]:
        """Compute the vectors of pictures, `[N, width]`, and return the tokens of each, too."""
        found = self.whole.get_image_features(**_copy_arrays(self.whole, arrays))
        return found.pooler_output, found.last_hidden_state.shape[1]


class PageTower(TextTower):
    """The queries of a model with a vector for each token of a query or the picture of a page."""

    def __init__(self, whole: Any) -> None:
        HeadedModule.__init__(self)
        self.whole, self.config = whole, whole.vlm.config.get_text_config()

    @property
    def body(self) -> Any:
        """The part that reads texts."""
        return find_text_part(self.whole.vlm)

    def forward(self, input_ids: Tensor, **options: Tensor) -> BaseModelOutput:
        """Compute `[N, L, width]` from `input_ids` `[N, L]`."""
        if self.whole.config.model_type == "colpali":  # Without segments it would be causal.
            options["token_type_ids"] = torch.zeros_like(input_ids)
        return BaseModelOutput(self.whole(input_ids=input_ids, **options).embeddings)

    def encode_images(self, arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[Tensor, int]:
        """Compute the vectors of a page, `[tokens, width]`, and return their number, too."""
        vectors = self.whole(**_copy_arrays(self.whole, arrays)).embeddings[0]
        return vectors, len(vectors)


def encode_message(
    whole: Any, transformer: Any, packed: PackedBatch, arrays: Mapping[str, npt.NDArray[Any]]
) -> tuple[Tensor, int]:
    """Compute the states of a message with a picture, `[T, width]`, and return its tokens, too.

    `transformer` computes texts by a part of `whole`.
    """
    inputs = _copy_arrays(whole, arrays) | transformer.inputs(packed)
    return whole(**inputs).last_hidden_state[0], packed.real_tokens


def _copy_arrays(module: Any, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
    tensors = {name: torch.from_numpy(array).to(module.device) for name, array in arrays.items()}
    if "pixel_scale" in tensors:
        scaled = tensors["pixel_values"] * tensors.pop("pixel_scale")
        tensors["pixel_values"] = scaled + tensors.pop("pixel_offset")
    return {
        name: tensor.to(module.dtype if tensor.is_floating_point() else torch.int64)
        for name, tensor in tensors.items()
    }


def find_text_part(module: Any) -> Any:
    """Return the part that computes the texts of a model with other inputs, or the whole."""
    text_config = getattr(module.config, "text_config", None)
    parts = (
        part
        for part in module.modules()
        if isinstance(part, PreTrainedModel) and type(part.config) is type(text_config)
        if not part.can_generate()  # The part without the head of a language model.
    )
    return next(parts, module)
