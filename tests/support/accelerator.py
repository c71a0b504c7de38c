"""Errors of an accelerator, as PyTorch makes them."""

import torch


def accelerator_error(code: int | None, message: str = "") -> Exception:
    """With the number of CUDA's runtime, which PyTorch adds."""
    error = torch.AcceleratorError(f"CUDA error: {message}")
    if code is not None:
        error.error_code = code
    return error


def broken_memory() -> Exception:
    return accelerator_error(214, "uncorrectable ECC error encountered")
