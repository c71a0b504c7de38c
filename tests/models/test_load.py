"""What the loader tells libraries before they are imported."""

import os

import pytest

from app.models import load as loading
from app.settings import Settings


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": "/bin"})


def test_pytorch_gets_the_options_of_its_allocator() -> None:
    loading._prepare_libraries(Settings())
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    loading._prepare_libraries(Settings(pytorch_cuda_alloc_conf="max_split_size_mb:64"))
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"


def test_pytorchs_own_newer_name_wins() -> None:
    os.environ["PYTORCH_ALLOC_CONF"] = "backend:native"
    loading._prepare_libraries(Settings())
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
