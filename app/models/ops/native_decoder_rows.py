"""`app.models.ops.decoder_rows` by the kernels in C."""

import torch
from torch import Tensor

from app.models.ops.decoder_rows import DecoderRows, PyTorchRows, RmsNorm, Rotation
from app.models.ops.native_library import LANES, Library, load_library, place


class NativeRows:
    """Passes over rows in C, in bfloat16 on a CPU."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def norm(self, states: Tensor, norm: RmsNorm) -> Tensor:
        """Implement `DecoderRows`."""
        output = torch.empty_like(states)
        places = (place(each, torch.bfloat16) for each in (states, norm.weight, output))
        self._library.run("rms_norm", *places, norm.epsilon, *states.shape)
        return output

    def turn(self, states: Tensor, norm: RmsNorm, rotation: Rotation) -> None:
        """Implement `DecoderRows`."""
        angles = (place(each, torch.float32) for each in (rotation.cosines, rotation.sines))
        self._library.run(
            "turn_heads",
            place(states, torch.bfloat16), place(norm.weight, torch.bfloat16), *angles,
            norm.epsilon, len(states), states.stride(0), *norm.weight.shape,
        )  # fmt: skip

    def gate(self, states: Tensor) -> Tensor:
        """Implement `DecoderRows`."""
        rows, both = states.shape
        output = states.new_empty(rows, both // 2)
        places = (place(each, torch.bfloat16) for each in (states, output))
        self._library.run("gate_rows", *places, rows, both // 2)
        return output


def choose_decoder_rows(device: torch.device, dtype: torch.dtype, inner_width: int) -> DecoderRows:
    """The fastest that runs here."""
    fits = device.type == "cpu" and dtype is torch.bfloat16 and inner_width % LANES == 0
    library = load_library() if fits else None
    return PyTorchRows() if library is None else NativeRows(library)
