"""Running the engines: settings tried out first, then rounds in which they take turns.

An engine is loaded for its turn and ended after it, so that no two are ever resident: figures of
memory are its own, and machines that hold one engine can compare many. A turn runs each workload
twice and counts the second run, when caches and kernels are warm. What came of a turn is kept at
once: a comparison that was interrupted goes on where it stopped.
"""

import hashlib
import math
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.adapters import FloatArray, Setting
from benchmarks.worker import Encoded, EngineFailureError, Run, measured
from benchmarks.workload import WORKLOADS, turns

# On how many texts a setting is tried, and a slow engine's, and with heavy texts.
_TRIAL_TEXTS, _SLOW_TRIAL_TEXTS, _HEAVY_TRIAL_TEXTS = 16, 4, 1
_REQUIREMENTS = Path(__file__).parents[1] / "requirements"
ENVIRONMENTS = Path("~/.cache/smart-embedder/benchmarks").expanduser()
OWN = "own"
_BATCHES = (1, 4, 8, 32)
_DEFAULTS = (Setting(),)
_BATCHED = tuple(Setting(batch) for batch in _BATCHES)
_OPENVINO = tuple(Setting(b, hint) for hint in ("latency", "throughput") for b in _BATCHES)
# The cosines are to the first of these that ran.
EXACT = ("flagembedding", "flagembedding-defaults", "smart-embedder-float32")
_KINDS = ("dense", "colbert")


@dataclass(frozen=True, slots=True)
class Contender:
    """One row of the table.

    `environment` names the requirements file of its packages, or is this project's own. The
    fastest of `settings` is found before the rounds. A `slow` one is warmed up with two texts, and
    has fewer rounds and no heavy texts.
    """

    adapter: str
    precision: str
    settings: tuple[Setting, ...] = _BATCHED
    environment: str = "peers"
    dense_only: bool = False
    slow: bool = False

    def settings_for(self, workload: str, texts: int) -> list[Setting]:
        """Those whose batches that many texts of the workload can fill; at least one."""
        about = WORKLOADS[workload]
        largest = min(about.largest_batch, texts)
        fitting = [each for each in self.settings if (each.batch or 1) <= largest]
        return [each for each in fitting if not (about.one_at_a_time and each.hint == "throughput")]


CATALOGUE = {
    "smart-embedder-float32": Contender("smart_embedder", "float32", _DEFAULTS, OWN, slow=True),
    "smart-embedder-bfloat16": Contender("smart_embedder", "bfloat16", _DEFAULTS, OWN),
    "smart-embedder-int8": Contender("smart_embedder", "int8", _DEFAULTS, OWN),
    "flagembedding-defaults": Contender("flag_embedding", "float32", _DEFAULTS, slow=True),
    "flagembedding": Contender("flag_embedding", "float32", slow=True),
    "m3serve-defaults": Contender("m3serve", "float32", _DEFAULTS, slow=True),
    "m3serve": Contender("m3serve", "float32", slow=True),
    "sentence-transformers-float32": Contender(
        "sentence_transformers", "float32", dense_only=True, slow=True
    ),
    "sentence-transformers-bfloat16": Contender(
        "sentence_transformers", "bfloat16", dense_only=True
    ),
    "infinity-float32": Contender(
        "infinity", "float32", environment="infinity", dense_only=True, slow=True
    ),
    "openvino-float32": Contender("openvino", "float32", _OPENVINO, slow=True),
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
    python = folder / name / "bin/python"
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
    """What to compare: texts of each workload, the one whose memory counts first.

    `vectors` is a folder for what the engines compute, `limit` the name of the instructions that
    they are limited to (see `benchmarks.worker`), `until` a time by `time.monotonic`: later no turn
    begins.
    """

    folder: Path
    texts: Mapping[str, list[str]]
    rounds: int
    patience: float
    vectors: Path
    limit: str = ""
    environments: Path = ENVIRONMENTS
    until: float = math.inf

    def texts_of(self, contender: Contender) -> dict[str, list[str]]:
        """The workloads of an engine."""
        return {
            workload: texts
            for workload, texts in self.texts.items()
            if not (contender.slow and WORKLOADS[workload].heavy)
        }


@dataclass(slots=True)
class Outcome:
    """What came of one engine so far, or why it has nothing; every field can be written as JSON.

    `rounds` are the seconds of each call, of each round of each workload.
    """

    name: str
    version: str = ""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    rounds: dict[str, list[list[float]]] = field(default_factory=dict)
    peak_bytes: int = 0
    cosines: dict[str, dict[str, float]] = field(default_factory=dict)
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
    def turns(self) -> int:
        """How many it had."""
        return max(map(len, self.rounds.values()), default=0)

    def median(self, workload: str) -> float:
        """Seconds of the median round."""
        return statistics.median(map(sum, self.rounds[workload]))


def compare(
    plan: Plan, outcomes: Sequence[Outcome], keep: Callable[[], None] = lambda: None
) -> None:
    """Give each engine the turns that it has not had; one that fails has no more.

    `keep` is called after every step that took long.
    """
    for outcome in outcomes:
        if not outcome.settings and time.monotonic() < plan.until:
            _choose_settings(plan, outcome)
            keep()
    named = {outcome.name: outcome for outcome in outcomes if outcome.settings}
    fewer = max(1, plan.rounds // 3)
    rounds = {name: fewer if CATALOGUE[name].slow else plan.rounds for name in named}
    for name in turns({name: rounds[name] - each.turns for name, each in named.items()}):
        if not named[name].failure and time.monotonic() < plan.until:
            _take_turn(plan, named[name])
            keep()
    _compare_vectors(plan, outcomes)
    keep()


def _choose_settings(plan: Plan, outcome: Outcome) -> None:
    """The fastest on a part of each workload's texts; with nothing to choose from, none is run."""
    trials = []
    for workload, texts in plan.texts_of(outcome.contender).items():
        count = _SLOW_TRIAL_TEXTS if outcome.contender.slow else _TRIAL_TEXTS
        count = _HEAVY_TRIAL_TEXTS if WORKLOADS[workload].heavy else count
        sample = texts[:: max(1, len(texts) // count)]
        settings = outcome.contender.settings_for(workload, len(sample))
        outcome.settings[workload] = asdict(settings[0])
        trials += [(workload, sample, each) for each in settings if len(settings) > 1]
    # Of each the second run counts.
    tried = _run(plan, outcome, [Run(*trial[1:]) for trial in trials for _ in range(2)])[1::2]
    best: dict[str, float] = {}
    for (workload, sample, setting), encoded in zip(trials, tried, strict=False):
        took = sum(encoded.seconds)
        _say(f"{outcome.name}, {setting}: {took:.2f} s, a trial of {workload}, {len(sample)} texts")
        if took < best.setdefault(workload, math.inf):
            best[workload], outcome.settings[workload] = took, asdict(setting)


def _take_turn(plan: Plan, outcome: Outcome) -> None:
    runs, given = [], plan.texts_of(outcome.contender)
    for workload, texts in given.items():
        setting, alone = Setting(**outcome.settings[workload]), WORKLOADS[workload].one_at_a_time
        # A slow engine is slow because of its padding, not for want of a warm-up.
        few = outcome.contender.slow or WORKLOADS[workload].heavy
        runs.append(Run(texts[:2] if few else texts, setting, alone))
        runs.append(Run(texts, setting, alone, str(_vectors_file(plan, workload, outcome))))
    found = _run(plan, outcome, runs)[1::2]
    for workload, encoded in zip(given, found, strict=False):
        seconds = [round(each, 5) for each in encoded.seconds]
        outcome.rounds.setdefault(workload, []).append(seconds)
        _say(f"{outcome.name}, {workload}, round {outcome.turns}: {sum(seconds):.2f} s")
    # Peaks are of the process so far.
    outcome.peak_bytes = max([outcome.peak_bytes, *(each.peak_bytes for each in found[:1])])


def _vectors_file(plan: Plan, workload: str, outcome: Outcome) -> Path:
    return plan.vectors / f"{workload}-{outcome.name}.npz"


def _run(plan: Plan, outcome: Outcome, runs: list[Run]) -> list[Encoded]:
    """What came of the runs; nothing where the engine failed, of which the reason is kept."""
    contender = outcome.contender
    if not runs:
        return []
    try:
        python = interpreter(contender.environment, plan.environments)
        outcome.version, found = measured(
            python,
            contender.adapter,
            plan.folder,
            contender.precision,
            runs,
            patience=plan.patience,
            limit=plan.limit,
        )
    except EngineFailureError as error:
        outcome.failure = str(error)
        _say(f"{outcome.name}: {error}")
        return []
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


Arrays = Mapping[str, FloatArray]


def _compare_vectors(plan: Plan, outcomes: Sequence[Outcome]) -> None:
    """Note the worst cosines to the exact engine; vectors of another shape are a failure."""
    ran = {each.name: each for each in outcomes if each.measured}
    for workload in plan.texts:
        wanted: Arrays = {}
        if exact := next((ran[name] for name in EXACT if name in ran), None):
            wanted = _vectors(_vectors_file(plan, workload, exact))
        for outcome in ran.values():
            vectors = _vectors(_vectors_file(plan, workload, outcome))
            try:
                cosines = {kind: worst_cosine(vectors, wanted, kind) for kind in _KINDS}
            except ValueError as error:
                outcome.failure = str(error)
                continue
            # What is no longer there was compared before.
            outcome.cosines[workload] = outcome.cosines.get(workload, {}) | {
                kind: cosine for kind, cosine in cosines.items() if cosine is not None
            }


def _vectors(file: Path) -> Arrays:
    if not file.exists():
        return {}
    with np.load(file) as arrays:
        return dict(arrays)


def worst_cosine(one: Arrays, other: Arrays, kind: str) -> float | None:
    """Of unit vectors in the same order; None where either has none of that kind.

    Raises `ValueError` where an answer does not hold a vector for each of what it was given.
    """
    if kind not in one or kind not in other:
        return None
    if one[kind].shape != other[kind].shape:
        shapes = f"{one[kind].shape} instead of {other[kind].shape}"
        raise ValueError(f"its {kind} vectors are {shapes}")
    return float(np.einsum("nw,nw->n", one[kind], other[kind]).min())
