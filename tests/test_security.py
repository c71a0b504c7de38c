"""What SECURITY.md promises: a checkpoint's heads are data, and nobody is told of its use."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from smart_embedder.errors import StartupError
from smart_embedder.kernels.target import Target, choose_backend
from smart_embedder.models.heads.m3 import M3Embedder
from tests.support.server import REPOSITORY

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


def test_the_service_switches_the_hubs_telemetry_off() -> None:
    """Whatever the environment says, and before the hub's library is imported."""
    script = (
        "import sys\n"
        "from smart_embedder.errors import StartupError\n"
        "from app.main import create_app, load_models\n"
        "from smart_embedder.settings import EngineSettings\n"
        "import smart_embedder.models.loader\n"
        "assert not {'huggingface_hub', 'transformers'} & sys.modules.keys()\n"
        "try: load_models(EngineSettings(embedding_model='no-such/model', hf_hub_offline=True))\n"
        "except StartupError: pass\n"
        "from huggingface_hub.constants import HF_HUB_DISABLE_TELEMETRY as off\n"
        "assert off\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
