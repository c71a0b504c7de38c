"""What SECURITY.md promises of a checkpoint: it is data, and none of its code runs."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from smart_embedder.errors import StartupError
from smart_embedder.models.ops.choose import choose_backend
from smart_embedder.models.ops.proof import Target
from smart_embedder.models.tasks.dense import M3Embedder
from tests.support.server import REPOSITORY

CPU = torch.device("cpu")


@pytest.fixture
def copy(tiny_m3: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_m3, tmp_path / "copy"))


def load(folder: Path) -> None:
    target = Target(CPU, torch.float32, choose_backend(CPU, torch.float32))
    M3Embedder("copy", folder, 8192, target)


class Intruder:
    """Unpickled without care, it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_a_checkpoints_own_python_files_are_never_run(copy: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (copy / "modeling_own.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    config = json.loads((copy / "config.json").read_text())
    config["auto_map"] = dict.fromkeys(("AutoConfig", "AutoModel"), "modeling_own.Own")
    (copy / "config.json").write_text(json.dumps(config))
    load(copy)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["sparse_linear.pt", "colbert_linear.pt"])
def test_a_pickle_that_would_run_code_stops_the_start(copy: Path, tmp_path: Path, name) -> None:
    mark = tmp_path / "mark"
    (copy / name).write_bytes(pickle.dumps(Intruder(mark), protocol=2))
    with pytest.raises(StartupError, match="is damaged"):
        load(copy)
    assert not mark.exists()


def test_weights_that_would_run_code_stop_the_start(copy: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for file in copy.glob("*.safetensors"):
        file.unlink()
    torch.save({"weight": Intruder(mark)}, copy / "pytorch_model.bin")
    with pytest.raises(StartupError):
        load(copy)
    assert not mark.exists()


def test_the_service_switches_the_hubs_telemetry_off() -> None:
    """Whatever the environment says, and before the hub's library is imported."""
    script = (
        "import sys\n"
        "from smart_embedder.errors import StartupError\n"
        "from smart_embedder.main import create_app, load_models\n"
        "from smart_embedder.settings import Settings\n"
        "assert 'huggingface_hub' not in sys.modules\n"
        "try: load_models(Settings(embedding_model='no-such/model', hf_hub_offline=True))\n"
        "except StartupError: pass\n"
        "from huggingface_hub.constants import HF_HUB_DISABLE_TELEMETRY as off\n"
        "assert off\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
