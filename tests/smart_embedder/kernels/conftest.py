"""Backends of the kernels in C, for each instruction set of this processor and each dtype."""

import pytest
import torch

from smart_embedder.kernels.backend import Backend
from smart_embedder.kernels.native import Library, native_backend
from tests.support.native import LIBRARIES


@pytest.fixture(scope="module", params=LIBRARIES, ids=lambda library: library.instructions.name)
def library(request: pytest.FixtureRequest) -> Library:
    found: Library = request.param
    return found


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture(scope="module")
def backend(library: Library, dtype: torch.dtype) -> Backend:
    return native_backend(library, dtype)
