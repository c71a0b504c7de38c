"""The virtual environment: how it is made, repaired and updated."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import local
from launcher.venv import Venv
from tests.launcher.checkout import (
    FAILED,
    LIBRARY,
    QWEN,
    ROOT,
    WHEELS,
    Checkout,
    add_program,
    read_app_output,
    write_wheel,
)
from tests.support.nvidia_driver import install_driver

HIDE = """
import importlib.machinery, sys
class Path(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == 'venv' else super().find_spec(name, path, target)
sys.meta_path = [Path if finder.__name__ == "PathFinder" else finder
                 for finder in sys.meta_path if hasattr(finder, "__name__")]
"""
# Mounts a folder over itself, read-only, in a new namespace, which needs no superuser.
READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 77; shift && exec "$@"'


def test_a_failed_build_of_the_kernels_only_costs_speed(started: Checkout) -> None:
    started.file(LIBRARY).unlink()
    failed = started.start("local cpu", BUILD_FAILS="1")
    slower = "Requests will be slower: the kernels could not be built (no compiler); "
    assert slower in failed.stdout
    assert read_app_output(failed)


def test_a_killed_installation_is_repeated_and_a_second_start_waits_for_it(
    started: Checkout, tmp_path: Path
) -> None:
    (site,) = started.file(".venv").glob("lib/*/site-packages")
    # Pip writes INSTALLER last.
    (site / "tiny-1.0.dist-info" / "INSTALLER").unlink()
    (site / "tiny.py").unlink()
    started.file(LIBRARY).unlink()
    os.mkfifo(tmp_path / "go on")
    waits = {"BUILD_WAITS_FOR": str(tmp_path / "go on")}
    first = started.begin("local cpu", **waits)
    assert first.stdout
    shown = "".join(iter(first.stdout.readline, "Building the kernels ...\n"))
    assert shown.count("Install") == 1, "only the package that was not complete"
    # The Python of the environment is enough.
    second = started.begin("local cpu", PYTHON="")
    assert second.stdout
    told_first = "Another start is installing: waiting until it has finished ...\n"
    assert second.stdout.readline() == told_first
    (tmp_path / "go on").write_text("")
    outputs = [process.communicate()[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0]
    assert all('"tiny": "1.0"' in output for output in outputs)
    assert not re.search("Install|Build", outputs[1]), "the second found everything there"


def test_a_package_of_another_version_is_missing(tmp_path: Path) -> None:
    info = tmp_path / "lib" / "python3" / "site-packages" / "tiny-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "INSTALLER").touch()
    for version in ("1.0", "2.0"):
        lock = tmp_path / "a.lock"
        lock.write_text(write_wheel(tmp_path / WHEELS, version))
        assert local.lacks_packages(Venv(tmp_path), str(lock)) == (version == "2.0")


def test_a_broken_environment_is_made_again_and_the_error_of_pip_names_the_log(
    started: Checkout,
) -> None:
    """A link is replaced, not followed."""
    stdout, stderr = json.loads(started.file(FAILED).read_text())
    details = "which takes a few minutes; .venv/install.log has the details."
    assert stdout.splitlines() == [
        f"The first start installs into .venv, {details}",
        "Installing the launcher's packages ...",
        "Installing PyTorch ...",
        "Installing the other packages ...",
    ]
    (sentence,) = stderr.splitlines()
    could_not = "start_server: pip could not install requirements/service.lock (THESE "
    assert sentence.startswith(could_not)
    assert sentence.endswith("; .venv/install.log has the details.")
    assert not started.file(".venv").is_symlink()
    assert [*started.file("target").iterdir()] == [started.file("target/file")]
    log = started.file(".venv/install.log").read_text()
    assert "Processing " in log
    assert "ERROR: " in log


def test_an_environment_holds_torch_for_one_kind_of_device(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = Path(".venv")
    for torch, fitting in ((None, {"cpu", "gpu"}), ("2.0+cpu", {"cpu"}), ("2.0", {"gpu"})):
        shutil.rmtree(first, ignore_errors=True)
        if torch is not None:
            package = first / "lib" / "python3" / "site-packages" / f"torch-{torch}.dist-info"
            package.mkdir(parents=True)
            (package / "INSTALLER").touch()
        for flavour in ("cpu", "gpu"):
            expected = first if flavour in fitting else Path(f".venv-{flavour}")
            assert local.choose_venv(flavour).folder == expected
    Path(".venv-gpu").mkdir()
    assert local.choose_venv("gpu").folder == Path(".venv-gpu")


def test_nothing_is_missing_in_an_environment_with_all_locked_packages(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    environment = Path(sys.prefix)
    if not (environment / "installed").exists():
        pytest.skip("this is not the environment that run_tests.sh makes of the lock files")
    for lock in (local.SERVICE, local.DEMO, "requirements/torch-cpu.lock"):
        assert not local.lacks_packages(Venv(environment), lock)
        assert local.lacks_packages(Venv(Path("no such folder")), lock)


def test_the_app_is_started_on_a_gpu_with_torch_in_its_own_environment(
    tmp_path: Path, started: Checkout
) -> None:
    first, second = started.file(".venv"), started.file(".venv-gpu")
    shutil.copytree(first, second, symlinks=True, copy_function=os.link)
    (torch,) = second.glob("lib/*/site-packages/torch-*.dist-info")
    shutil.rmtree(torch)
    driver = install_driver(tmp_path, 13_010, gpus=2)
    on_gpu = driver | {"DEVICE": "cpu", "PYTHON": str(first / "bin" / "python")}
    result = started.start("local gpu", **on_gpu)
    assert result.stdout.startswith("Installing PyTorch ...\n")
    found = read_app_output(result)
    assert (found["DEVICE"], found["prefix"], found["tiny"]) == ("cuda", str(second), "1.0")
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    # What .env sets stays.
    lines = ["DEVICE=cuda:1", "PYTORCH_CUDA_ALLOC_CONF=backend:native", "QWEN_RERANK_BATCH_SIZE=2"]
    lines += [f"RERANKER_MODEL={QWEN['RERANKER_MODEL']}"]
    started.file(".env").write_text("\n".join(lines))
    add_program(started.tools, "nvidia-smi", "echo 24576")
    found = read_app_output(started.start("local gpu", **driver))
    assert found["prefix"] == str(second)
    assert not {"DEVICE", "QWEN_RERANK_BATCH_SIZE"} & {*found}
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "backend:native"
    assert found["QWEN_RERANK_MAX_LENGTH"] == "8192"


def test_a_python_without_venv_is_reported(checkout: Checkout) -> None:
    """Debian packages Python without that module."""
    result = checkout.start("local cpu", PYTHON=checkout.prepared_python(HIDE))
    assert result.returncode == 1
    assert "-m venv' could not make .venv: " in result.stderr
    assert "No module named venv" in result.stderr


def test_a_read_only_folder_is_reported(checkout: Checkout) -> None:
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("a file system of a test's own needs unshare, of util-linux")
    prefix = [unshare, "--user", "--map-root-user", "--mount", "sh", "-c", READ_ONLY, "sh"]
    prefix.append(str(checkout.folder))
    if probe := subprocess.run([*prefix, "true"], check=False).returncode:
        pytest.skip(f"no file system may be mounted here: status {probe}")
    result = checkout.start("local cpu", prefix)
    assert result.returncode == 1
    (sentence,) = result.stderr.splitlines()
    assert re.match("start_server: .* could not make .venv: .*Read-only", sentence)
