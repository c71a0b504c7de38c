"""What SECURITY.md promises: a checkpoint's heads are data.

That the hub's telemetry is off is in tests/smart_embedder/test_startup.py.
"""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from smart_embedder.errors import StartupError
from smart_embedder.kernels.target import Target, choose_backend
from smart_embedder.models.heads.m3 import M3Embedder

CPU = torch.device("cpu")


class Intruder:
    """Unpickled without care, it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", ["sparse_linear.pt", "colbert_linear.pt"])
def test_a_pickle_that_would_run_code_stops_the_start(tiny_m3: Path, tmp_path: Path, name) -> None:
    copy, mark = Path(shutil.copytree(tiny_m3, tmp_path / "copy")), tmp_path / "mark"
    (copy / name).write_bytes(pickle.dumps(Intruder(mark), protocol=2))
    target = Target(CPU, torch.float32, choose_backend(CPU, torch.float32))
    with pytest.raises(StartupError, match="is damaged"):
        M3Embedder("copy", copy, 8192, target)
    assert not mark.exists()
