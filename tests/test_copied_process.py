"""The copies that tests start in place of fresh interpreters (`tests.support.copied_process`)."""

import subprocess
from pathlib import Path

import pytest

from tests.support.bad_start import run_until_exit
from tests.support.server import start_process

PRINT = """
import json, os, pathlib, sys, threading
print(json.dumps({"folder": os.getcwd(), "arguments": sys.argv[1:], "path": sys.path[0],
                  "main": sys.modules["__main__"].__name__, "name": __name__,
                  "variables": dict(os.environ), "threads": threading.active_count(),
                  "open": sorted(fd for fd in os.listdir("/proc/self/fd") if int(fd) < 3)}))
sys.exit(7)
"""


def told(folder: Path, *, fresh: bool) -> tuple[int, str]:
    return run_until_exit(
        folder, module="told", arguments=["--one", "two"], fresh=fresh, SETTING="a b"
    )


def test_a_copy_is_given_what_a_fresh_interpreter_is_given(tmp_path: Path) -> None:
    """Folder, arguments, variables and output, and its exit status is returned."""
    (tmp_path / "told.py").write_text(PRINT)
    status, output = told(tmp_path, fresh=False)
    assert (status, output) == told(tmp_path, fresh=True)
    assert status == 7
    assert '"SETTING": "a b"' in output


def test_a_copy_that_is_killed_has_the_status_of_the_signal(tmp_path: Path) -> None:
    (tmp_path / "asleep.py").write_text("import signal\nprint('up', flush=True)\nsignal.pause()\n")
    process = start_process(tmp_path, "asleep")
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "up\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.kill()
        assert process.wait(60) == -9
        assert process.stdout.read() == ""
        process.terminate()  # It has ended: nobody is sent the signal.


def test_the_template_has_imported_what_most_of_a_start_is(tmp_path: Path) -> None:
    """Else the copies would gain nothing. The hub's library reads its settings when imported."""
    (tmp_path / "imported.py").write_text(
        "import sys\nprint([name in sys.modules for name in ('torch', 'huggingface_hub')])\n"
    )
    assert run_until_exit(tmp_path, module="imported") == (0, "[True, False]\n")
