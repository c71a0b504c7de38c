"""Bringing results back from the device, with one wait for all of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from app.errors import InferenceError
from app.jobs import FloatArray


def to_host(tensors: Sequence[Tensor | None]) -> list[FloatArray | None]:
    """float32 tensors of one device as arrays; None stays None.

    Raises `InferenceError` where a number is not finite.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    # Not finite as soon as one number is not: a look at every number without a copy of any.
    sums = torch.stack([tensor.sum() for tensor in given])
    copies = [tensor.to("cpu", non_blocking=True) for tensor in [sums, *given]]
    if sums.is_cuda:
        torch.cuda.current_stream(sums.device).synchronize()
    if not copies[0].isfinite().all():
        raise InferenceError("the model returned a number that is not finite")
    arrays = (copy.numpy() for copy in copies[1:])
    return [None if tensor is None else next(arrays) for tensor in tensors]
