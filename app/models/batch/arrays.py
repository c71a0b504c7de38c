"""numpy arrays that describe a batch, and their copies to the device."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Indices = npt.NDArray[np.int64]


def to_device(device: torch.device, array: npt.NDArray[Any]) -> torch.Tensor:
    """Copy an array to the device; to a CUDA device without waiting for the copy."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    # From pageable memory the copy would wait for the forward that still runs.
    return tensor.pin_memory().to(device, non_blocking=True)
