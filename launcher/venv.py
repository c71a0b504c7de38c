"""A virtual environment: made when missing or broken; installed by stamp."""

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path, PurePath

from launcher.checks import need_of, require_space_to_install
from launcher.console import WINDOWS, LaunchError, Progress, last_line, say

KERNELS = Path("smart_embedder/models/ops")
_KERNEL_SOURCES = {".c", ".h", ".py", ".txt"}
_WORKS = "import pip, sys; sys.exit(sys.version_info < (3, 11))"
_PACKAGE = re.compile(
    r"(?:Collecting|Processing|Requirement already satisfied:|Ignoring) ([^\s=@:]+)"
)


@dataclass(frozen=True, slots=True)
class Source:
    """Locked packages, or one package by itself, and the options for the index they come from."""

    file: Path
    name: str
    arguments: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many packages it has; on some systems fewer are installed."""
        return len(re.findall(r"(?m)^[^#\s-]", self.file.read_text("utf-8")))


def locked(file: str, name: str) -> Source:
    """Return the packages of a lock file, which names every one of them with its hashes."""
    return Source(existing(file), name, ("--no-deps", "--require-hashes", "-r", file))


@dataclass(slots=True)
class PipRun:
    """What is learnt from pip's lines: how far it is, whether it has begun to write, its error."""

    progress: Progress
    count: int
    collected: int = 0
    wrote: bool = False
    error: str = "it says nothing"
    package: str = ""

    def follow(self, line: str) -> None:
        """Read one line."""
        if found := _PACKAGE.match(line):
            self.collected += 1
            self.package = PurePath(found[1]).name
            self._show(self.package)
        elif "Downloading" in line and (size := re.search(r"\(([^()]+B)\)$", line)):
            self._show(f"{self.package}, {size[1]}")
        elif line.startswith("Installing collected"):  # The only step that writes.
            self.wrote = True
            self._show("unpacking")
        elif line.startswith("ERROR:"):
            self.error = line.removeprefix("ERROR:").strip().rstrip(".")

    def _show(self, text: str) -> None:
        self.progress.detail(f"{min(self.collected, self.count)} of {self.count}, {text}")


@dataclass(frozen=True, slots=True)
class Venv:
    """A virtual environment in `folder`, and the marks that the launcher leaves in it.

    `lock` is a descriptor that what writes into the environment holds until its end.
    """

    folder: Path
    lock: int | None = None
    progress: Progress = field(default_factory=Progress)

    @property
    def python(self) -> Path:
        """Its own Python."""
        return self.folder / ("Scripts/python.exe" if WINDOWS else "bin/python")

    @property
    def unfinished(self) -> Path:
        """The mark of an environment that was interrupted while it was being written."""
        return self.folder / ".unfinished"

    @property
    def log(self) -> Path:
        """What pip and the other programs said."""
        return self.folder / "install.log"

    def stamp(self, name: str) -> Path:
        """Return the file that holds the digest of what was last installed or built."""
        return self.folder / f".installed-{name}"

    def make(self, flavour: str) -> None:
        """Make the environment, unless the one that is there can be used."""
        if self._is_usable():
            return
        require_venv()
        require_space_to_install(Path.cwd(), need_of(requirements(flavour)))
        say(
            f"The first start installs into {self.folder}, which takes a few minutes; "
            f"{self.log} has the details."
        )
        self.progress.step(f"Making {self.folder} with Python {platform.python_version()}")
        self._clear()
        self._create()
        self.stamp(flavour).touch()
        self.unfinished.unlink()

    def _clear(self) -> None:
        """Empty the folder, with the mark in it before anything goes and until all is made."""
        try:
            remove_file(self.folder)
            self.folder.mkdir(exist_ok=True)
            self.unfinished.touch()
            for entry in self.folder.iterdir():
                if entry != self.unfinished:
                    remove(entry)
        except OSError as error:
            raise LaunchError(
                f"{self.folder} cannot be written in {Path.cwd()}: {error.strerror}."
            ) from error

    def _create(self) -> None:
        # None that lies in the one to be replaced.
        python = str(getattr(sys, "_base_executable", "") or sys.executable)
        made = subprocess.run(
            [python, "-m", "venv", self.folder],
            capture_output=True,
            text=True,
            check=False,
            pass_fds=self._held,
        )
        if made.returncode:
            raise LaunchError(
                f"'{python} -m venv' could not make {self.folder}. "
                f"It said: {made.stdout}{made.stderr}".rstrip()
            )

    def _is_usable(self) -> bool:
        """Tell whether it is whole."""
        if self.unfinished.exists() or not self.python.exists():
            return False
        try:
            found = subprocess.run([self.python, "-c", _WORKS], capture_output=True, check=False)
        except OSError:
            return False
        return found.returncode == 0

    def install(self, name: str, *sources: Source) -> None:
        """Install what the sources lock, in their order, unless just that is installed."""
        wanted = digest_of(*(source.file for source in sources))
        if self._is_stamped(name, wanted):
            return
        for source in sources:
            self._install(source)
        self.stamp(name).write_text(f"{wanted}\n")

    def build_kernels(self) -> None:
        """Build them, and try once for each state of them: without them the service is slower."""
        files = sorted(path for path in KERNELS.rglob("*") if path.suffix in _KERNEL_SOURCES)
        wanted = digest_of(*files)
        if self._is_stamped("kernels", wanted):
            return
        build = ("-m", "smart_embedder.models.ops.build")
        self.progress.step("Building the kernels")
        try:
            self.run("the kernels could not be built", *build)
        except LaunchError as error:
            self.progress.interrupt()
            say(f"Going on without them, slower: {error}")
            say(f"To try again: {shlex.join([str(self.python), *build])}")
        self.stamp("kernels").write_text(f"{wanted}\n")

    def run(self, failure: str, *arguments: str) -> None:
        """Run its Python; its output is the step's progress, and goes to the log.

        Raises `LaunchError` where it fails.
        """
        lines = []
        with (
            self.log.open("a", encoding="utf-8") as log,
            subprocess.Popen(
                [self.python, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            ) as program,
        ):
            for line in program.stdout or ():
                log.write(line)
                lines.append(line)
                self.progress.detail(line.strip())
        if program.returncode:
            said = last_line("".join(lines))
            raise LaunchError(f"{failure} ({said}); {self.log} has the details.")

    def _is_stamped(self, name: str, wanted: str) -> bool:
        stamp = self.stamp(name)
        return stamp.is_file() and stamp.read_text().strip() == wanted

    def _install(self, source: Source) -> None:
        """Run pip, under a mark that stays where it ended in the middle of writing."""
        self.progress.step(f"Installing {source.name}")
        self.unfinished.touch()
        # Where PyTorch's own index is out of reach, pip would ask it five times for every package.
        retries = os.environ.get("PIP_RETRIES") or "2"
        run = PipRun(self.progress, source.count)
        with (
            self.log.open("a", encoding="utf-8") as log,
            subprocess.Popen(
                [self.python, "-m", "pip", "install", "--no-input", *source.arguments],
                env=os.environ | {"PIP_RETRIES": retries, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                pass_fds=self._held,
            ) as pip,
        ):
            for line in pip.stdout or ():
                log.write(line)
                run.follow(line.strip())
        if not (pip.returncode and run.wrote):
            self.unfinished.unlink()
        if pip.returncode:
            raise LaunchError(
                f"pip could not install {source.file} ({run.error}); {self.log} has all that it "
                "said."
            )

    @property
    def _held(self) -> tuple[int, ...]:
        """The lock, to be inherited: what outlives a killed launcher keeps the next one waiting."""
        return () if WINDOWS or self.lock is None else (self.lock,)


def folder_for(flavour: str) -> Path:
    """Return the environment of a device: .venv is that of the first one, and is kept for it.

    pip takes the CPU and the GPU build of torch for one version, so each device has its own.
    """
    first, own = Venv(Path(".venv")), Path(f".venv-{flavour}")
    other = "gpu" if flavour == "cpu" else "cpu"
    return own if own.exists() or first.stamp(other).exists() else first.folder


def digest_of(*files: Path) -> str:
    """Return what changes when a file does."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def requirements(name: str) -> Path:
    """Return requirements-NAME.txt, which must be there."""
    return existing(f"requirements-{name}.txt")


def existing(name: str) -> Path:
    """Return a file of the checkout; raise `LaunchError` where it is not there."""
    file = Path(name)
    if not file.is_file():
        raise LaunchError(f"{file} is missing from {Path.cwd()}.")
    return file


def require_venv() -> None:
    """Raise `LaunchError` where Python was packaged without what makes virtual environments."""
    missing = [name for name in ("venv", "ensurepip") if find_spec(name) is None]
    if missing:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise LaunchError(
            f"Python {version} lacks its module {' and '.join(missing)}, which makes virtual "
            f"environments: on Debian and Ubuntu 'apt-get install python{version}-venv' adds it."
        )


def remove(path: Path) -> None:
    """Remove a folder, or whatever else has its name; a link goes, what it points to stays."""
    remove_file(path)
    if path.exists():
        shutil.rmtree(path)


def remove_file(path: Path) -> None:
    """Remove a file or a link, and leave a folder."""
    if path.is_symlink() or path.is_file():
        path.unlink()
