"""What the loader tells libraries before they are imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import smart_embedder
from smart_embedder.models import load as loading
from smart_embedder.models import loader
from smart_embedder.settings import Settings


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": "/bin"})


@pytest.mark.parametrize(
    ("already", "changes", "name", "value"),
    [
        ({}, {}, "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ({}, {"pytorch_cuda_alloc_conf": "x:64"}, "PYTORCH_CUDA_ALLOC_CONF", "x:64"),
        # PyTorch's own newer name wins.
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, {}, "PYTORCH_CUDA_ALLOC_CONF", None),
        # Threads sleep soon unless the user says how they wait.
        ({}, {}, "GOMP_SPINCOUNT", "2000"),
        ({"GOMP_SPINCOUNT": "7"}, {}, "GOMP_SPINCOUNT", "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {}, "GOMP_SPINCOUNT", None),
    ],
)
def test_libraries_are_told_what_settings_and_users_say(already, changes, name, value) -> None:
    os.environ.update(already)
    loading._prepare_libraries(Settings(**changes))
    assert os.environ.get(name) == value


def test_a_thread_that_computes_soon_gets_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.getswitchinterval()
    monkeypatch.setattr(loading, "read_ahead", lambda *_: None)
    monkeypatch.setattr(loader, "load", lambda settings, *_, **__: settings)
    try:
        for interval, expected in (0.005, 1e-4), (2e-5, 2e-5):
            sys.setswitchinterval(interval)
            loading.load_models(Settings())
            assert sys.getswitchinterval() == pytest.approx(expected)
    finally:
        sys.setswitchinterval(before)


@pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP is PyTorch's on Linux")
def test_openmp_reads_how_long_to_spin(tmp_path: Path) -> None:
    """It reads the process's environment when PyTorch is imported, after the app was created."""
    program = (
        "import sys, smart_embedder.main\n"
        "smart_embedder.main.app\n"
        "assert 'torch' not in sys.modules\n"
        "from smart_embedder.models import load\n"
        "load._prepare_libraries(load.Settings())\n"
        "import torch\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program],
        env={
            "OMP_DISPLAY_ENV": "VERBOSE",
            "PYTHONPATH": str(Path(smart_embedder.__file__).parents[1]),
        },
        cwd=tmp_path,  # Our own folder may hold an .env.
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "GOMP_SPINCOUNT = '2000'" in shown.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only there is a library linked ahead")
def test_pytorchs_library_is_linked_before_it_is_imported(tmp_path: Path) -> None:
    program = (
        "import os, sys, threading\n"
        "from pathlib import Path\n"
        "from smart_embedder.models import load\n"
        "load.link_ahead()\n"
        "for each in threading.enumerate()[1:]: each.join()\n"
        "print('torch' in sys.modules, 'libtorch_cpu' in Path('/proc/self/maps').read_text(),\n"
        "    os.environ['GOMP_SPINCOUNT'])\n"
        "import torch\n"
        "print(float(torch.ones(3) @ torch.ones(3)), (Path(torch.__file__).parent /\n"
        "    'lib/libtorch_cuda.so').exists())\n"
    )
    environment = {"PYTHONPATH": str(Path(smart_embedder.__file__).parents[1])}
    answer = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True,
        text=True, timeout=120, check=True,
    )  # fmt: skip
    before, after = answer.stdout.splitlines()
    assert after in {"3.0 False", "3.0 True"}
    if after.endswith("False"):
        assert before == "False True 2000"


def test_a_start_from_local_folders_imports_neither_pytorchs_compiler_nor_the_hubs_library(
    tiny_m3: Path, tiny_qwen: Path, tmp_path: Path
) -> None:
    program = (
        "import sys\n"
        "from smart_embedder.models.load import Settings, load_models\n"
        "_, embedder, reranker = sys.argv\n"
        "load_models(Settings(embedding_model=embedder, reranker_model=reranker, device='cpu'))\n"
        "print([name for name in ('torch._dynamo', 'huggingface_hub') if name in sys.modules])\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program, tiny_m3, tiny_qwen],
        env={"PYTHONPATH": str(Path(smart_embedder.__file__).parents[1])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert shown.stdout.splitlines()[-1] == "[]"
