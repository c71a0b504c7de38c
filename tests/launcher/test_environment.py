"""The virtual environment: made, repaired, and installed only where something changed."""

from pathlib import Path

from launcher import environment
from tests.launcher.checkout import make_checkout, needs_bash, start, told, write_wheel

pytestmark = needs_bash


def test_the_environment_alone_is_enough_for_a_second_start(started: Path, tools: Path) -> None:
    assert told(start("local", "cpu", script=started, PATH=str(tools), PYTHON=""))["tiny"] == "1.0"


def test_a_start_installs_only_what_changed(started: Path, tmp_path: Path) -> None:
    requirements = started.with_name("requirements-cpu.txt")
    before = requirements.read_text()
    assert "Installing" not in start("local", "cpu", script=started).stdout
    requirements.write_text(str(write_wheel(tmp_path, "2.0")))
    changed = start("local", "cpu", script=started)
    assert "Installing" in changed.stdout
    assert "Making" not in changed.stdout
    assert told(changed)["tiny"] == "2.0"
    requirements.write_text(before)
    assert told(start("local", "cpu", script=started))["tiny"] == "1.0"


def test_a_failed_install_is_an_error_and_leaves_the_environment_alone(started: Path) -> None:
    requirements = started.with_name("requirements-cpu.txt")
    before = requirements.read_text()
    requirements.write_text("./missing-1.0-py3-none-any.whl\n")
    failed = start("local", "cpu", script=started)
    requirements.write_text(before)
    assert failed.returncode == 1
    assert "start_server: pip could not install requirements-cpu.txt" in failed.stderr
    again = start("local", "cpu", script=started)
    assert told(again)["tiny"] == "1.0"
    assert "Making" not in again.stdout


def test_a_half_made_environment_is_repaired_and_a_change_of_device_starts_afresh(
    tmp_path: Path,
) -> None:
    script = make_checkout(tmp_path / "checkout")
    (tmp_path / "venv.py").write_text(
        "import pathlib, sys\npathlib.Path(sys.argv[1], 'bin').mkdir()\nsys.exit('half')\n"
    )
    failed = start("local", "cpu", script=script, PYTHONPATH=str(tmp_path))
    assert failed.returncode == 1
    assert "apt-get install python3-venv" in failed.stderr
    assert "It said: half" in failed.stderr
    assert (script.parent / ".venv" / "bin").is_dir()

    repaired = start("local", "cpu", script=script)
    assert "Making .venv" in repaired.stdout
    assert told(repaired)["DEVICE"] == "cpu"

    own_python = str(script.with_name(".venv") / "bin" / "python")
    changed = start("local", "gpu", script=script, PYTHON=own_python)
    assert "Making .venv" in changed.stdout
    assert told(changed)["DEVICE"] == "cuda"


def test_removing_an_environment_that_is_a_link_leaves_what_it_points_to(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / ".venv"
    target.mkdir()
    link.symlink_to(target)
    environment.remove(link)
    assert target.is_dir()
    assert not link.is_symlink()
