"""Compare engines: try their settings first, then run rounds in which the engines alternate.

An engine is loaded for its turn and ended after it, so that only one is in memory. A turn runs each
workload twice and counts the second run, when caches and kernels are warm. Its figures are saved at
once, so that an interrupted comparison continues where it stopped.
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
from benchmarks.worker import Encoded, EngineFailureError, Run, measure
from benchmarks.workload import WORKLOADS, alternate

# Texts with which a setting is tried: of other engines, of slow ones, of heavy workloads.
_TRIAL_TEXTS, _SLOW_TRIAL_TEXTS, _HEAVY_TRIAL_TEXTS = 16, 4, 1
_REQUIREMENTS = Path(__file__).parents[1] / "requirements"
ENVIRONMENTS = Path("~/.cache/smart-embedder/benchmarks").expanduser()
OWN = "own"
_BATCHES = (1, 4, 8, 32)
_DEFAULTS = (Setting(),)
_BATCHED = tuple(Setting(batch) for batch in _BATCHES)
_OPENVINO = tuple(Setting(b, hint) for hint in ("latency", "throughput") for b in _BATCHES)
# Cosines are to the vectors of the first of these that ran.
EXACT = ("flagembedding", "smart-embedder-float32")
_KINDS = ("dense", "colbert")


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine of the comparison.

    `environment` names the requirements file of its packages, or is `OWN`. The fastest of
    `settings` is found before the rounds. A `slow` engine is warmed up with two texts, and has
    fewer rounds and no heavy workloads.
    """

    adapter: str
    precision: str
    settings: tuple[Setting, ...] = _BATCHED
    environment: str = "peers"
    dense_only: bool = False
    slow: bool = False

    def settings_for(self, workload: str, texts: int) -> list[Setting]:
        """Return the settings whose batches this number of texts can fill; at least one."""
        facts = WORKLOADS[workload]
        largest = min(facts.largest_batch, texts)
        return [
            setting
            for setting in self.settings
            if (setting.batch or 1) <= largest
            and not (facts.one_at_a_time and setting.hint == "throughput")
        ]


CATALOGUE = {
    "smart-embedder-float32": Contender("smart_embedder", "float32", _DEFAULTS, OWN, slow=True),
    "smart-embedder-bfloat16": Contender("smart_embedder", "bfloat16", _DEFAULTS, OWN),
    "smart-embedder-int8": Contender("smart_embedder", "int8", _DEFAULTS, OWN),
    "flagembedding": Contender("flag_embedding", "float32", slow=True),
    "m3serve": Contender("m3serve", "float32", slow=True),
    "sentence-transformers-float32": Contender(
        "sentence_transformers", "float32", dense_only=True, slow=True
    ),
    "infinity-float32": Contender(
        "infinity", "float32", environment="infinity", dense_only=True, slow=True
    ),
    "openvino-float32": Contender("openvino", "float32", _OPENVINO, slow=True),
    "openvino-bfloat16": Contender("openvino", "bfloat16", _OPENVINO),
    "openvino-int8": Contender("openvino", "int8", _OPENVINO),
}


def create_environment(name: str, folder: Path) -> Path:
    """Return the Python of an environment; create or update the environment if needed."""
    if name == OWN:
        return Path(sys.executable)
    requirements = _REQUIREMENTS / f"{name}.txt"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    stamp = folder / name / "installed"
    python = folder / name / "bin/python"
    if not stamp.exists() or stamp.read_text() != digest:
        _log(f"Installing requirements/{requirements.name} into {folder / name} ...")
        venv.create(folder / name, clear=True)
        _install(python, requirements)
        stamp.write_text(digest)
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
    """A comparison: the texts of each workload; peak memory is that of the first workload.

    `vectors` is the folder for the engines' vectors, `limit` a key of `worker.LIMITS`, `until` the
    time by `time.monotonic` after which no turn begins.
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
        """Return the workloads of an engine."""
        return {
            workload: texts
            for workload, texts in self.texts.items()
            if not (contender.slow and WORKLOADS[workload].heavy)
        }


@dataclass(slots=True)
class Outcome:
    """The figures of one engine so far, or its failure; all fields can be written as JSON.

    `rounds` has, for each workload, the seconds of each call of each round.
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
        """Whether the engine has figures and has not failed."""
        return bool(self.rounds) and not self.failure

    @property
    def turns(self) -> int:
        """How many turns the engine has had."""
        return max(map(len, self.rounds.values()), default=0)

    def median(self, workload: str) -> float:
        """Return the seconds of the median round."""
        return statistics.median(map(sum, self.rounds[workload]))


def compare(
    plan: Plan, outcomes: Sequence[Outcome], save: Callable[[], None] = lambda: None
) -> None:
    """Run the missing turns of each engine; an engine that fails has no more turns.

    Calls `save` after each step that takes long.
    """
    for outcome in outcomes:
        if not outcome.settings and time.monotonic() < plan.until:
            _choose_settings(plan, outcome)
            save()
    by_name = {outcome.name: outcome for outcome in outcomes if outcome.settings}
    fewer = max(1, plan.rounds // 3)
    rounds = {name: fewer if CATALOGUE[name].slow else plan.rounds for name in by_name}
    missing = {name: rounds[name] - outcome.turns for name, outcome in by_name.items()}
    for name in alternate(missing):
        if not by_name[name].failure and time.monotonic() < plan.until:
            _run_turn(plan, by_name[name])
            save()
    _compare_vectors(plan, outcomes)
    save()


def _choose_settings(plan: Plan, outcome: Outcome) -> None:
    """Choose the fastest setting for each workload by trials with a part of its texts."""
    trials = []
    for workload, texts in plan.texts_of(outcome.contender).items():
        count = _SLOW_TRIAL_TEXTS if outcome.contender.slow else _TRIAL_TEXTS
        count = _HEAVY_TRIAL_TEXTS if WORKLOADS[workload].heavy else count
        sample = texts[:: max(1, len(texts) // count)]
        settings = outcome.contender.settings_for(workload, len(sample))
        outcome.settings[workload] = asdict(settings[0])
        if len(settings) > 1:
            trials += [(workload, sample, setting) for setting in settings]
    # The second run of each counts.
    results = _run(plan, outcome, [Run(*trial[1:]) for trial in trials for _ in range(2)])[1::2]
    best: dict[str, float] = {}
    for (workload, sample, setting), encoded in zip(trials, results, strict=False):
        seconds = sum(encoded.seconds)
        _log(
            f"{outcome.name}, {setting}: {seconds:.2f} s, trial of {workload}, {len(sample)} texts"
        )
        if seconds < best.setdefault(workload, math.inf):
            best[workload], outcome.settings[workload] = seconds, asdict(setting)


def _run_turn(plan: Plan, outcome: Outcome) -> None:
    runs, workloads = [], plan.texts_of(outcome.contender)
    for workload, texts in workloads.items():
        setting, alone = Setting(**outcome.settings[workload]), WORKLOADS[workload].one_at_a_time
        # A slow engine is slow because it pads, so that a short warm-up is enough.
        few = outcome.contender.slow or WORKLOADS[workload].heavy
        runs.append(Run(texts[:2] if few else texts, setting, alone))
        runs.append(Run(texts, setting, alone, str(_vectors_file(plan, workload, outcome))))
    results = _run(plan, outcome, runs)[1::2]
    for workload, encoded in zip(workloads, results, strict=False):
        seconds = [round(call, 5) for call in encoded.seconds]
        outcome.rounds.setdefault(workload, []).append(seconds)
        _log(f"{outcome.name}, {workload}, round {outcome.turns}: {sum(seconds):.2f} s")
    # The peak of the process grows with each workload: the first one's counts.
    outcome.peak_bytes = max([outcome.peak_bytes, *(encoded.peak_bytes for encoded in results[:1])])


def _vectors_file(plan: Plan, workload: str, outcome: Outcome) -> Path:
    return plan.vectors / f"{workload}-{outcome.name}.npz"


def _run(plan: Plan, outcome: Outcome, runs: list[Run]) -> list[Encoded]:
    """Run an engine; return nothing if it fails, and note the failure."""
    contender = outcome.contender
    if not runs:
        return []
    try:
        python = create_environment(contender.environment, plan.environments)
        outcome.version, results = measure(
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
        _log(f"{outcome.name}: {error}")
        return []
    return results


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


Arrays = Mapping[str, FloatArray]


def _compare_vectors(plan: Plan, outcomes: Sequence[Outcome]) -> None:
    """Note the lowest cosines to the exact engine; vectors of another shape are a failure."""
    measured = {outcome.name: outcome for outcome in outcomes if outcome.measured}
    for workload in plan.texts:
        expected: Arrays = {}
        if exact := next((measured[name] for name in EXACT if name in measured), None):
            expected = _load_vectors(_vectors_file(plan, workload, exact))
        for outcome in measured.values():
            vectors = _load_vectors(_vectors_file(plan, workload, outcome))
            try:
                cosines = {kind: lowest_cosine(vectors, expected, kind) for kind in _KINDS}
            except ValueError as error:
                outcome.failure = str(error)
                continue
            # Keep the cosines of an earlier run, whose files may be gone.
            outcome.cosines[workload] = outcome.cosines.get(workload, {}) | {
                kind: cosine for kind, cosine in cosines.items() if cosine is not None
            }


def _load_vectors(file: Path) -> Arrays:
    if not file.exists():
        return {}
    with np.load(file) as arrays:
        return dict(arrays)


def lowest_cosine(one: Arrays, other: Arrays, kind: str) -> float | None:
    """Return the lowest cosine of unit vectors in the same order; None if either lacks the kind.

    Raises `ValueError` if the numbers of vectors differ.
    """
    if kind not in one or kind not in other:
        return None
    if one[kind].shape != other[kind].shape:
        shapes = f"{one[kind].shape} instead of {other[kind].shape}"
        raise ValueError(f"its {kind} vectors are {shapes}")
    return float(np.einsum("nw,nw->n", one[kind], other[kind]).min())
