"""The packages for a machine with no package index."""

import pytest

from benchmarks.gpu.wheels import requirements


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_each_package_comes_in_one_version_and_without_pytorch(python: str) -> None:
    names = [each.split("==")[0] for each in requirements(python, [])]
    assert len(names) == len(set(names))
    assert {"numpy", "pytest", "transformers", "uvloop"} <= set(names)
    assert not {"torch", "cuda-bindings", "nvidia-cuda-nvrtc"} & set(names)


def test_only_some_of_them() -> None:
    assert [each.split("==")[0] for each in requirements("3.12", ["FlagEmbedding"])] == [
        "flagembedding"
    ]
