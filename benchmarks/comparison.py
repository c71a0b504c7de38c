"""Running the engines: settings tried out first, then rounds in which they take turns.

An engine is loaded for its turn and ended after it, so that no two are ever resident: figures of
memory are its own, and machines that hold one engine can compare many. Every turn runs the whole
workload twice and counts the second run, when caches and kernels are warm.
"""

import hashlib
import statistics
import subprocess
import sys
import venv
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.adapters.interface import Setting
from benchmarks.turns import turns
from benchmarks.worker import Encoded, EngineFailureError, EngineProcess, engine_process
from benchmarks.workload import Workload

Ceilings = dict[str, float]

# On how many texts a setting is tried.
_TRIAL_TEXTS = 32
_REQUIREMENTS = Path(__file__).parents[1] / "requirements"
DEFAULT_FOLDER = Path("~/.cache/smart-embedder/benchmarks").expanduser()
OWN = "own"
_BATCHES = (1, 4, 8, 32)
_DEFAULTS = (Setting(),)
_BATCHED = tuple(Setting(batch) for batch in _BATCHES)
_OPENVINO = tuple(Setting(b, hint) for hint in ("latency", "throughput") for b in _BATCHES)
# The ratios are to the faster of these.
REFERENCES = ("flagembedding", "flagembedding-defaults")
# The cosines are to the first of these that ran.
EXACT = ("flagembedding", "flagembedding-defaults", "smart-embedder-float32")


@dataclass(frozen=True, slots=True)
class Contender:
    """One row of the table.

    `environment` names the requirements file of its packages, or is this project's own. The
    fastest of `settings` is found before the rounds. A `slow` one has a single round.
    """

    adapter: str
    precision: str
    settings: tuple[Setting, ...] = _BATCHED
    environment: str = "peers"
    dense_only: bool = False
    slow: bool = False

    def settings_for(self, workload: Workload, texts: int) -> list[Setting]:
        """Those whose batches that many texts of the workload can fill; at least one."""
        largest = min(workload.largest_batch, texts)
        fitting = [each for each in self.settings if (each.batch or 1) <= largest]
        return [
            each for each in fitting if not (workload.one_at_a_time and each.hint == "throughput")
        ]


def _own(precision: str) -> Contender:
    return Contender("smart_embedder", precision, _DEFAULTS, OWN)


CATALOGUE = {
    "smart-embedder-float32": _own("float32"),
    "smart-embedder-bfloat16": _own("bfloat16"),
    "smart-embedder-int8": _own("int8"),
    "flagembedding-defaults": Contender("flag_embedding", "float32", _DEFAULTS, slow=True),
    "flagembedding": Contender("flag_embedding", "float32"),
    "m3serve-defaults": Contender("m3serve", "float32", _DEFAULTS, slow=True),
    "m3serve": Contender("m3serve", "float32"),
    "sentence-transformers-float32": Contender("sentence_transformers", "float32", dense_only=True),
    "sentence-transformers-bfloat16": Contender(
        "sentence_transformers", "bfloat16", dense_only=True
    ),
    "infinity-float32": Contender("infinity", "float32", environment="infinity", dense_only=True),
    "openvino-bfloat16": Contender("openvino", "bfloat16", _OPENVINO),
    "openvino-int8": Contender("openvino", "int8", _OPENVINO),
}


class EnvironmentFailureError(Exception):
    """Packages could not be installed; the text says which and why in one line."""


def interpreter(name: str, folder: Path) -> Path:
    """The Python of the environment `name` under `folder`, which is made or renewed if needed."""
    if name == OWN:
        return Path(sys.executable)
    requirements = _REQUIREMENTS / f"{name}.txt"
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    stamp = folder / name / "installed"
    python = folder / name / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not stamp.exists() or stamp.read_text() != wanted:
        print(
            f"Installing requirements/{requirements.name} into {folder / name} ...", file=sys.stderr
        )
        venv.create(folder / name, clear=True)
        _install(python, requirements)
        stamp.write_text(wanted)
    return python


def _install(python: Path, requirements: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    install = ["install", "--quiet", "--retries", "1", "-r", str(requirements)]
    done = subprocess.run([*pip, *install], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"]
        raise EnvironmentFailureError(
            f"requirements/{requirements.name} cannot be installed: {lines[-1]}"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What to compare; `vectors` is a folder for what the engines compute."""

    folder: Path
    workload: Workload
    texts: list[str]
    rounds: int
    environments: Path
    patience: float
    vectors: Path


@dataclass(slots=True)
class Outcome:
    """What came of one engine: its rounds, or why it has none."""

    name: str
    setting: Setting | None = None
    version: str = ""
    rounds: list[Encoded] = field(default_factory=list)
    failure: str = ""

    @property
    def contender(self) -> Contender:
        """Its entry in the catalogue."""
        return CATALOGUE[self.name]

    @property
    def measured(self) -> bool:
        """Whether every turn it had went well."""
        return bool(self.rounds) and not self.failure

    @property
    def seconds(self) -> list[float]:
        """Of the whole workload, round by round."""
        return [sum(encoded.seconds) for encoded in self.rounds]

    @property
    def median(self) -> float:
        """Seconds of the median round."""
        return statistics.median(self.seconds)

    @property
    def call_seconds(self) -> list[float]:
        """Of every single call of every round."""
        return [seconds for encoded in self.rounds for seconds in encoded.seconds]

    @property
    def peak_bytes(self) -> int:
        """Of resident memory, in any round."""
        return max(encoded.peak_bytes for encoded in self.rounds)


class Comparison:
    """Collects an outcome for each engine and the machine's ceilings in each round."""

    def __init__(self, plan: Plan, names: list[str], ceilings: Callable[[], Ceilings]) -> None:
        self._plan = plan
        self._measure_ceilings = ceilings
        self.outcomes = {name: Outcome(name) for name in names}
        self.ceilings: list[Ceilings] = []

    async def run(self) -> None:
        """Choose every engine's setting, then take turns; an engine that fails has no more."""
        for outcome in self.outcomes.values():
            with _failure_kept(outcome):
                await self._choose_setting(outcome)
        rounds = {name: 1 if CATALOGUE[name].slow else self._plan.rounds for name in self.outcomes}
        last = -1
        for number, name in turns(rounds):
            if number > last:
                self.ceilings.append(self._measure_ceilings())
                last = number
            await self._turn(self.outcomes[name], number)

    def vectors_file(self, outcome: Outcome) -> Path:
        """Where the vectors of its last round are."""
        return self._plan.vectors / f"{outcome.name}.npz"

    async def _choose_setting(self, outcome: Outcome) -> None:
        """The fastest on a part of the texts; with nothing to choose from, nothing is run."""
        sample = self._plan.texts[:: max(1, len(self._plan.texts) // _TRIAL_TEXTS)]
        settings = outcome.contender.settings_for(self._plan.workload, len(sample))
        outcome.setting = settings[0]
        if len(settings) == 1:
            return
        async with self._started(outcome) as engine:
            tried = {each: await _try_out(engine, outcome.name, sample, each) for each in settings}
        outcome.setting = min(tried, key=lambda setting: tried[setting])

    async def _turn(self, outcome: Outcome, number: int) -> None:
        if outcome.failure or outcome.setting is None:
            return
        with _failure_kept(outcome):
            encoded = await self._measure(outcome, outcome.setting)
            outcome.rounds.append(encoded)
            _say(f"{outcome.name}, round {number + 1}: {sum(encoded.seconds):.2f} s")

    async def _measure(self, outcome: Outcome, setting: Setting) -> Encoded:
        plan, alone = self._plan, self._plan.workload.one_at_a_time
        # A slow engine is slow because of its padding, not for want of a warm-up.
        warm_up = plan.texts[:2] if outcome.contender.slow else plan.texts
        async with self._started(outcome) as engine:
            await engine.encode(warm_up, setting, one_at_a_time=alone)
            return await engine.encode(
                plan.texts, setting, one_at_a_time=alone, save=self.vectors_file(outcome)
            )

    @asynccontextmanager
    async def _started(self, outcome: Outcome) -> AsyncIterator[EngineProcess]:
        plan, contender = self._plan, outcome.contender
        python = interpreter(contender.environment, plan.environments)
        async with engine_process(python, plan.patience) as engine:
            outcome.version = await engine.load(contender.adapter, plan.folder, contender.precision)
            yield engine


async def _try_out(engine: EngineProcess, name: str, texts: list[str], setting: Setting) -> float:
    """Seconds of the second run with that setting."""
    await engine.encode(texts, setting)
    seconds = sum((await engine.encode(texts, setting)).seconds)
    _say(f"{name}, {setting}: {seconds:.2f} s, a trial with {len(texts)} texts")
    return seconds


@contextmanager
def _failure_kept(outcome: Outcome) -> Iterator[None]:
    try:
        yield
    except (EngineFailureError, EnvironmentFailureError) as error:
        outcome.failure = str(error)
        _say(f"{outcome.name}: {error}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
