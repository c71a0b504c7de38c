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
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.adapters.interface import Setting
from benchmarks.turns import turns
from benchmarks.worker import Encoded, Engine, EngineFailureError, Run, measured
from benchmarks.workload import Workload

# On how many texts a setting is tried.
_TRIAL_TEXTS = 32
_REQUIREMENTS = Path(__file__).parents[1] / "requirements"
ENVIRONMENTS = Path("~/.cache/smart-embedder/benchmarks").expanduser()
OWN = "own"
_BATCHES = (1, 4, 8, 32)
_DEFAULTS = (Setting(),)
_BATCHED = tuple(Setting(batch) for batch in _BATCHES)
_OPENVINO = tuple(Setting(b, hint) for hint in ("latency", "throughput") for b in _BATCHES)


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


CATALOGUE = {
    "smart-embedder-float32": Contender("smart_embedder", "float32", _DEFAULTS, OWN),
    "smart-embedder-bfloat16": Contender("smart_embedder", "bfloat16", _DEFAULTS, OWN),
    "smart-embedder-int8": Contender("smart_embedder", "int8", _DEFAULTS, OWN),
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


def interpreter(name: str, folder: Path) -> Path:
    """The Python of the environment `name` under `folder`, which is made or renewed if needed."""
    if name == OWN:
        return Path(sys.executable)
    requirements = _REQUIREMENTS / f"{name}.txt"
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    stamp = folder / name / "installed"
    python = folder / name / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not stamp.exists() or stamp.read_text() != wanted:
        _say(f"Installing requirements/{requirements.name} into {folder / name} ...")
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
        raise EngineFailureError(
            f"requirements/{requirements.name} cannot be installed: {lines[-1]}"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What to compare; `vectors` is a folder for what the engines compute."""

    folder: Path
    workload: Workload
    texts: list[str]
    rounds: int
    patience: float
    vectors: Path
    environments: Path = ENVIRONMENTS


@dataclass(slots=True)
class Outcome:
    """What came of one engine: its rounds and where its vectors are, or why it has none."""

    name: str
    vectors: Path
    setting: Setting = field(default_factory=Setting)
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


def compare(plan: Plan, names: list[str]) -> list[Outcome]:
    """The outcome of each engine; one that fails has no more turns."""
    outcomes = {name: Outcome(name, plan.vectors / f"{name}.npz") for name in names}
    for outcome in outcomes.values():
        _choose_setting(plan, outcome)
    for name in turns({name: 1 if CATALOGUE[name].slow else plan.rounds for name in names}):
        _take_turn(plan, outcomes[name])
    return list(outcomes.values())


def _choose_setting(plan: Plan, outcome: Outcome) -> None:
    """The fastest on a part of the texts; with nothing to choose from, nothing is run."""
    sample = plan.texts[:: max(1, len(plan.texts) // _TRIAL_TEXTS)]
    settings = outcome.contender.settings_for(plan.workload, len(sample))
    outcome.setting = settings[0]
    if len(settings) == 1:
        return
    # Of each the second run counts.
    tried = _run(plan, outcome, [Run(sample, each) for each in settings for _ in range(2)])[1::2]
    for setting, encoded in zip(settings, tried, strict=False):
        took = f"{sum(encoded.seconds):.2f} s, a trial with {len(sample)} texts"
        _say(f"{outcome.name}, {setting}: {took}")
    if tried:
        seconds = [sum(encoded.seconds) for encoded in tried]
        outcome.setting = settings[seconds.index(min(seconds))]


def _take_turn(plan: Plan, outcome: Outcome) -> None:
    if outcome.failure:
        return
    alone = plan.workload.one_at_a_time
    # A slow engine is slow because of its padding, not for want of a warm-up.
    warm_up = plan.texts[:2] if outcome.contender.slow else plan.texts
    runs = [Run(warm_up, outcome.setting, alone)]
    runs.append(Run(plan.texts, outcome.setting, alone, str(outcome.vectors)))
    outcome.rounds += (found := _run(plan, outcome, runs)[1:])
    for encoded in found:
        _say(f"{outcome.name}, round {len(outcome.rounds)}: {sum(encoded.seconds):.2f} s")


def _run(plan: Plan, outcome: Outcome, runs: list[Run]) -> list[Encoded]:
    """What came of the runs; nothing where the engine failed, of which the reason is kept."""
    contender = outcome.contender
    try:
        python = interpreter(contender.environment, plan.environments)
        engine = Engine(python, contender.adapter, plan.folder, contender.precision)
        outcome.version, found = measured(engine, runs, plan.patience)
    except EngineFailureError as error:
        outcome.failure = str(error)
        _say(f"{outcome.name}: {error}")
        return []
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
