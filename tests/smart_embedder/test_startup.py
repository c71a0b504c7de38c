"""Startup: environment variables of libraries, the switch interval, and imports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import smart_embedder
from smart_embedder import startup as loading
from smart_embedder.models import loader
from smart_embedder.settings import EngineSettings


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": "/bin"})


@pytest.mark.parametrize(
    ("variables", "name", "value"),
    [
        ({}, "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "x:64"}, "PYTORCH_CUDA_ALLOC_CONF", "x:64"),
        # The newer name of PyTorch takes precedence.
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "PYTORCH_CUDA_ALLOC_CONF", None),
        # The user may set how threads wait.
        ({}, "GOMP_SPINCOUNT", "2000"),
        ({"GOMP_SPINCOUNT": "7"}, "GOMP_SPINCOUNT", "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "GOMP_SPINCOUNT", None),
    ],
)
def test_variables_of_libraries_are_set_unless_the_user_sets_them(variables, name, value) -> None:
    os.environ.update(variables)
    loading._prepare_libraries()
    assert os.environ.get(name) == value


def test_the_switch_interval_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.getswitchinterval()
    monkeypatch.setattr(loading, "read_ahead", lambda *_: None)
    monkeypatch.setattr(loader.EntryLoader, "load_defaults", lambda _: None)
    try:
        for interval, expected in (0.005, 1e-4), (2e-5, 2e-5):
            sys.setswitchinterval(interval)
            loading.load_models(EngineSettings())
            assert sys.getswitchinterval() == pytest.approx(expected)
    finally:
        sys.setswitchinterval(before)


START = """
import json, sys, threading
from pathlib import Path
import app.main
app.main.app
from smart_embedder import startup
startup.link_ahead()
[thread.join() for thread in threading.enumerate() if thread.name == "link"]
print(json.dumps('torch' in sys.modules))
print(json.dumps('libtorch_cpu' in Path('/proc/self/maps').read_text()))
_, embedder, reranker = sys.argv
settings = startup.EngineSettings(embedding_model=embedder, reranker_model=reranker, device='cpu')
startup.load_models(settings)
import torch
print(json.dumps((Path(torch.__file__).parent / 'lib/libtorch_cuda.so').exists()))
needless = ('torch._dynamo', 'huggingface_hub', 'transformers')
print(json.dumps([name for name in needless if name in sys.modules]))
from smart_embedder.errors import StartupError
absent = startup.EngineSettings(embedding_model='no-such/model', hf_hub_offline=True)
try: startup.load_models(absent)
except StartupError: pass
from huggingface_hub.constants import HF_HUB_DISABLE_TELEMETRY
print(json.dumps(HF_HUB_DISABLE_TELEMETRY))
"""


def test_torch_is_linked_before_its_import_and_no_needless_module_is_imported(
    tiny_m3: Path, tiny_qwen: Path, tmp_path: Path
) -> None:
    """Import the app, and load models from local folders."""
    done = subprocess.run(
        [sys.executable, "-c", START, tiny_m3, tiny_qwen],
        env={
            "OMP_DISPLAY_ENV": "VERBOSE",
            "HF_HUB_DISABLE_TELEMETRY": "0",
            "PYTHONPATH": str(Path(smart_embedder.__file__).parents[1]),
        },
        cwd=tmp_path,  # Our own folder may hold an .env.
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    printed = map(json.loads, done.stdout.splitlines())
    imported, linked, for_cuda, needless, without_telemetry = printed
    # Neither PyTorch's compiler nor the hub's library nor transformers.
    assert needless == []
    assert without_telemetry, "whatever the environment says, as SECURITY.md promises"
    if sys.platform == "linux":
        assert not imported
        assert linked or for_cuda
        # OpenMP reads the process's environment when it is linked, after the app was created.
        assert "GOMP_SPINCOUNT = '2000'" in done.stderr
