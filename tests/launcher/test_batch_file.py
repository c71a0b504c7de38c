"""start_server.bat: read, and run by wine's cmd where that is installed.

Batch files stand in for Windows' Python, docker and nvidia-smi, as pyenv's python is one too.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.checkout import FLAVOURS, MEMORIES, ROOT, WITHOUT_PYTHON, sentence_of

# Debian keeps wine's own programs off the PATH.
FOLDERS = os.pathsep.join((os.environ["PATH"], "/usr/lib/wine"))
BATCH_FILE = ROOT / "start_server.bat"
PYTHON = ('if "%~1"=="-c" exit /b 0', "echo ran {name} %*", "exit /b 7")
OLD_PYTHON = ("exit /b 1",)
CONFIG = tuple(
    f'if "%~4"=="config" echo       {name}: {value}'
    for name, value in (
        ("DEVICE", "gpu"),  # An argument of the build.
        ("DEVICE", "%DEVICE%"),
        ("DENSE_EMBEDDING_MODEL", "%DENSE_EMBEDDING_MODEL%"),
        ("RERANKER_MODEL", "%RERANKER_MODEL%"),
        ("QWEN_RERANK_BATCH_SIZE", "null"),
    )
)
DOCKER = (
    'if "%~1"=="{fails}" exit /b 1',
    'if "%~1 %~2"=="{fails}" exit /b 1',
    *CONFIG,
    'if "%~4"=="up" echo ran docker %*',
    'if "%~4"=="up" exit /b {up}',
    "exit /b 0",
)
NO_PYTHON = "Python 3.11 or newer was not found: install it, or set PYTHON to its path."
NOT_UP = "docker compose could not start the service; its message above says why."


def find(*names: str) -> str:
    """The first of wine's programs that is installed; skips without any."""
    for name in names:
        if program := shutil.which(name, path=FOLDERS):
            return program
    pytest.skip("wine is not installed: start_server.bat cannot be run")


def environment_of(wine: Path) -> dict[str, str]:
    """What every program of wine needs: no .NET, no browser."""
    quiet = {"WINEDEBUG": "-all", "WINEDLLOVERRIDES": "mscoree,mshtml="}
    home = {"HOME": str(wine), "WINEPREFIX": str(wine / "windows")}
    return quiet | home | {"PATH": os.environ["PATH"]}


@pytest.fixture(scope="module")
def wine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of an installed Windows, which takes 15 seconds and 700 MB.

    Wine looks for programs in it alone, so what lies on this machine's PATH is not found.
    """
    program, server = find("wine64", "wine"), find("wineserver64", "wineserver")
    folder = tmp_path_factory.mktemp("wine")
    environment = environment_of(folder)
    try:
        subprocess.run(
            [program, "wineboot", "--init"], env=environment, capture_output=True, check=True
        )
        yield folder
    finally:
        for option in ("--kill", "--wait"):
            subprocess.run([server, option], env=environment, check=False)
        shutil.rmtree(folder)  # pytest would keep the last three.


def windows_path(path: Path) -> str:
    """What a file of this machine is called in wine."""
    return "Z:" + str(path).replace("/", "\\")


def write_batch_file(file: Path, lines: tuple[str, ...]) -> Path:
    """Write a batch file with the line ends that cmd needs."""
    file.write_bytes("".join(f"{line}\r\n" for line in ("@echo off", *lines)).encode())
    return file


class Checkout:
    """A folder with start_server.bat in it, and the programs that it finds."""

    def __init__(self, wine: Path, folder: Path, name: str = "a checkout (x86) & more") -> None:
        self.wine = wine
        self.folder = folder / name
        self.programs = folder / "programs"
        for made in (self.folder, self.programs):
            made.mkdir()
        shutil.copy(BATCH_FILE, self.folder)
        (self.folder / "launcher").mkdir()
        for text in (ROOT / "launcher").glob("*.txt"):
            shutil.copy(text, self.folder / "launcher")

    def start(
        self, line: str = "", answers: str = "", **variables: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run it in cmd. Its name begins with a dot, or wine's cmd takes it for `start`."""
        programs = {"WINEPATH": windows_path(self.programs)}
        result = subprocess.run(
            [find("wine64", "wine"), "cmd", "/c", f".\\{BATCH_FILE.name}", *line.split()],
            env=environment_of(self.wine) | programs | {"DEVICE": "auto"} | variables,
            cwd=self.folder,
            input=answers,
            capture_output=True,
            text=True,
            check=False,
        )
        # Wine reports a crash of a program of its own, which happens on a busy machine.
        result.stderr = re.sub(r"(?m)^wine: .*\n", "", result.stderr)
        return result

    def add(self, name: str, lines: tuple[str, ...]) -> Path:
        return write_batch_file(self.programs / f"{name}.bat", lines)

    def add_python(self, name: str) -> Path:
        return self.add(name, tuple(line.format(name=name) for line in PYTHON))

    def add_docker(self, fails: str = "nothing", up: int = 0) -> None:
        self.add("docker", tuple(line.format(fails=fails, up=up) for line in DOCKER))


@pytest.fixture
def checkout(wine: Path, tmp_path: Path) -> Checkout:
    return Checkout(wine, tmp_path)


def test_a_window_that_explorer_opened_stays_until_its_error_is_read(
    wine: Path, tmp_path: Path
) -> None:
    # Wine's cmd has no variable that holds its command line, and trips over an & in one.
    checkout = Checkout(wine, tmp_path, "a checkout")
    path = windows_path(checkout.folder / BATCH_FILE.name)
    explorer = {"CMDCMDLINE": f'C:\\windows\\cmd.exe /c ""{path}" "'}
    # Where the input is no console, nobody could press a key.
    failed = checkout.start("local cpu", answers="x", **explorer)
    assert failed.returncode == 1
    assert "Press any key" not in failed.stdout
    checkout.add("timeout", ("exit /b 0",))  # As Windows' ends at a console.
    failed = checkout.start("local cpu", answers="x", **explorer)
    assert failed.returncode == 1
    assert NO_PYTHON in failed.stderr
    assert "Press any key" in failed.stdout
    checkout.add("python", ("exit /b 0",))
    ended = checkout.start("local cpu", answers="x", **explorer)
    assert (ended.returncode, ended.stdout) == (0, "")
    checkout.add("python", OLD_PYTHON)
    by_a_program = checkout.start("local cpu", CMDCMDLINE=f"cmd /c .\\{BATCH_FILE.name} local cpu")
    assert sentence_of(by_a_program) == NO_PYTHON


@pytest.mark.parametrize("line", ["local", "LOCAL Cpu --demo", "docker gpu --demo", "bogus x"])
def test_the_launcher_gets_the_arguments_and_passes_on_its_exit_code(
    checkout: Checkout, line: str
) -> None:
    checkout.add_python("python")
    result = checkout.start(line)
    assert (result.returncode, result.stderr) == (7, "")
    assert result.stdout.split() == f"ran python -m launcher {line}".split()


def test_the_first_python_that_works_is_taken(checkout: Checkout) -> None:
    checkout.add_python("python")
    assert "ran python -m" in checkout.start("local").stdout
    checkout.add_python("python3")
    assert "ran python3 -m" in checkout.start("local").stdout
    checkout.add("py", ('if not "%~1"=="-3.12" exit /b 103', "shift", *PYTHON))
    assert "-3.12 -m launcher local" in checkout.start("local").stdout
    for name in ("py", "python3"):
        checkout.add(name, OLD_PYTHON)
    assert "ran python -m" in checkout.start("local").stdout


def test_the_environment_of_another_python_is_left_out(checkout: Checkout) -> None:
    names = ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH")
    values = "".join(f"[%{name}%]" for name in names)
    checkout.add("python", (PYTHON[0], f"echo {values}"))
    shown = checkout.start("local", **dict.fromkeys(names, "mine")).stdout
    assert shown.strip() == "[][][]"


def test_the_python_of_an_earlier_start_is_enough(checkout: Checkout) -> None:
    """It must be a program; wine's own cmd does for one, which ends well without input."""
    scripts = checkout.folder / ".venv" / "Scripts"
    scripts.mkdir(parents=True)
    windows = checkout.wine / "windows" / "drive_c" / "windows" / "system32"
    shutil.copy(windows / "cmd.exe", scripts / "python.exe")
    assert checkout.start("local").returncode == 0


def test_a_python_named_by_the_user_is_taken_and_must_work(checkout: Checkout) -> None:
    checkout.add_python("python")
    mine = write_batch_file(checkout.folder / "my python.bat", (PYTHON[0], "echo mine %*"))
    result = checkout.start("local cpu", PYTHON=windows_path(mine))
    assert result.stdout.split() == ["mine", "-m", "launcher", "local", "cpu"]
    old = write_batch_file(checkout.folder / "old python.bat", OLD_PYTHON)
    for named in ("no such python", windows_path(old)):
        assert sentence_of(checkout.start("local", PYTHON=named)) == (
            f'"PYTHON={named}" is not a working Python 3.11 or newer.'
        )


@pytest.mark.parametrize(("line", "fails", "sentence"), WITHOUT_PYTHON)
def test_without_a_python_one_sentence_says_what_is_needed(
    checkout: Checkout, line: str, fails: str | None, sentence: str
) -> None:
    checkout.add("python", OLD_PYTHON)
    if fails is not None:
        checkout.add_docker(fails=fails)
    assert sentence_of(checkout.start(line)).startswith(sentence)


@pytest.mark.parametrize(("line", "nvidia_smi", "flavour"), FLAVOURS)
def test_docker_starts_the_compose_file_of_the_device(
    checkout: Checkout, line: str, nvidia_smi: int | None, flavour: str
) -> None:
    checkout.add_docker()
    if nvidia_smi is not None:
        checkout.add("nvidia-smi", (f"exit /b {nvidia_smi}",))
    result = checkout.start(line)
    assert (result.returncode, result.stderr) == (0, "")
    file = f"docker-compose.{flavour}.yml"
    *chosen, ran, logs = (text.strip() for text in result.stdout.splitlines())
    assert chosen == ["Set for this start: DEVICE=cuda."] * (line == "gpu")
    assert ran.lower() == f"ran docker compose -f {file} up --build -d"
    path = windows_path(checkout.folder / file)
    assert logs == f'Smart Embedder is starting. Logs: docker compose -f "{path}" logs -f'


_TUNED = "%QWEN_RERANK_BATCH_SIZE% %QWEN_RERANK_MAX_LENGTH%"
TOLD = (
    *CONFIG,
    f'if "%~4"=="up" echo told %DENSE_EMBEDDING_MODEL% %RERANKER_MODEL% {_TUNED}',
    "exit /b 0",
)
QWEN = "Qwen/Qwen3-Reranker-0.6B"


def told(result: "subprocess.CompletedProcess[str]") -> list[str]:
    """Return the models and limits that compose was started with, of those that are set."""
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if "told " in line]
    return line.partition("told ")[2].split()


@pytest.mark.parametrize(
    ("answers", "variables", "expected"),
    [
        ("qwen\r\n", {"RERANKER_MODEL": "mine"}, ["Qwen/Qwen3-Embedding-0.6B", "mine"]),
        ("QWEN\r\n", {"DENSE_EMBEDDING_MODEL": "mine"}, ["mine", QWEN, "1", "2048"]),
        ("", {}, ["BAAI/bge-reranker-v2-m3"]),
    ],
)
def test_it_asks_at_a_console(
    checkout: Checkout, answers: str, variables: dict[str, str], expected: list[str]
) -> None:
    """What stands in for Windows' timeout ends well, as that does at a console.

    One answer at a time, because wine reads all that a pipe holds as one line.
    """
    checkout.add("docker", TOLD)
    checkout.add("timeout", ("exit /b 0",))
    asked = checkout.start("docker cpu", answers=answers, **variables)
    assert told(asked) == expected
    assert asked.stdout.count("BGE or QWEN [BGE]: ") == 2 - len(variables)
    assert re.search(r"(?m)^  QWEN  Qwen/\S+, 1.2 GB", asked.stdout)
    for limit in ("QWEN_RERANK_BATCH_SIZE=1", "QWEN_RERANK_MAX_LENGTH=2048"):
        assert (f"Set for this start: {limit}." in asked.stdout) == ("2048" in expected)


def test_it_does_not_ask_for_what_compose_reads_and_auto_follows_the_device(
    checkout: Checkout,
) -> None:
    checkout.add("docker", TOLD)
    checkout.add("timeout", ("exit /b 0",))
    variables = {"DENSE_EMBEDDING_MODEL": "mine", "RERANKER_MODEL": "my/model"}
    result = checkout.start("docker", DEVICE="cuda:1", **variables)
    assert told(result) == ["mine", "my/model"]
    assert "BGE or QWEN" not in result.stdout
    assert "docker-compose.gpu.yml" in result.stdout


@pytest.mark.parametrize(("report", "tuned"), MEMORIES)
def test_the_memory_of_the_gpu_sets_the_limits(
    checkout: Checkout, report: tuple[str, ...], tuned: str
) -> None:
    checkout.add("docker", TOLD)
    checkout.add("nvidia-smi", tuple(f"echo {line}" for line in report))
    assert told(checkout.start("docker gpu", RERANKER_MODEL=QWEN)) == [QWEN, *tuned.split()]


def test_docker_that_cannot_start_is_an_error(checkout: Checkout) -> None:
    checkout.add_docker(up=14)
    result = checkout.start()
    assert result.returncode == 1
    assert result.stderr.strip() == f"start_server: {NOT_UP}"


def test_it_has_windows_line_ends_and_every_label_it_jumps_to() -> None:
    text = BATCH_FILE.read_bytes()
    assert text.count(b"\n") == text.count(b"\r\n"), "cmd misses labels in files with bare newlines"
    labels = set(re.findall(rb"^:(\w+)", text, re.MULTILINE))
    jumps = set(re.findall(rb"\bgoto (\w+)|\bcall :(\w+)", text))
    assert {goto or call for goto, call in jumps} <= labels
