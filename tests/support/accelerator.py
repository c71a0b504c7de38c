"""Errors of an accelerator, as PyTorch raises them."""

import torch


def accelerator_error(code: int | None, message: str = "") -> Exception:
    """Return an error with a code of CUDA's runtime."""
    error = torch.AcceleratorError(f"CUDA error: {message}")
    if code is not None:
        error.error_code = code
    return error


def broken_memory() -> Exception:
    return accelerator_error(214, "uncorrectable ECC error encountered")
