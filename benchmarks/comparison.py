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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.adapters import FloatArray, Setting
from benchmarks.turns import turns
from benchmarks.worker import Encoded, Engine, EngineFailureError, Run, measured
from benchmarks.workload import Workload
from tools.table import markdown

# On how many texts a setting is tried.
_TRIAL_TEXTS = 32
_REQUIREMENTS = Path(__file__).parents[1] / "requirements"
ENVIRONMENTS = Path("~/.cache/smart-embedder/benchmarks").expanduser()
OWN = "own"
_BATCHES = (1, 4, 8, 32)
_DEFAULTS = (Setting(),)
_BATCHED = tuple(Setting(batch) for batch in _BATCHES)
_OPENVINO = tuple(Setting(b, hint) for hint in ("latency", "throughput") for b in _BATCHES)
# The ratios are to the faster of these.
REFERENCES = ("flagembedding", "flagembedding-defaults")
# The cosines are to the first of these that ran.
EXACT = (*REFERENCES, "smart-embedder-float32")


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
        if not outcomes[name].failure:
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
    seconds = {each: sum(encoded.seconds) for each, encoded in zip(settings, tried, strict=False)}
    for setting, took in seconds.items():
        _say(f"{outcome.name}, {setting}: {took:.2f} s, a trial with {len(sample)} texts")
    outcome.setting = min(seconds, key=lambda each: seconds[each], default=settings[0])


def _take_turn(plan: Plan, outcome: Outcome) -> None:
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


# ---- from outcomes to the figures of the table and of the JSON file

Arrays = Mapping[str, FloatArray]
# The columns between the setting and the rounds, and how a figure is written in them.
_FIGURES = {
    "texts/s": ("texts_per_second", ".2f"),
    "tokens/s": ("tokens_per_second", ".0f"),
    "ratio": ("ratio", ".2f"),
    "peak MiB": ("peak_mib", ".0f"),
    "dense cosine": ("dense", ".6f"),
    "ColBERT cosine": ("colbert", ".6f"),
    "P50 ms": ("p50_ms", ".1f"),
    "P99 ms": ("p99_ms", ".1f"),
}


@dataclass(frozen=True, slots=True)
class Speed:
    """What was measured of one engine; None where there is nothing to compare with.

    `ratio` is to the faster FlagEmbedding; `dense` and `colbert` are the worst cosine of a text and
    of a token to float32; `p50_ms` and `p99_ms` are of single calls;
    `rounds` are seconds of the whole workload.
    """

    texts_per_second: float
    tokens_per_second: float
    ratio: float | None
    peak_mib: float
    dense: float | None
    colbert: float | None
    p50_ms: float
    p99_ms: float
    rounds: list[float]


@dataclass(frozen=True, slots=True)
class Row:
    """One engine, with its speed or the reason why it has none."""

    engine: str
    version: str
    setting: str
    dense_only: bool
    failure: str
    speed: Speed | None


def rows_of(outcomes: Sequence[Outcome], lengths: list[int]) -> list[Row]:
    """A row for each outcome, of texts that have so many tokens."""
    ran = {each.name: each for each in outcomes if each.measured}
    reference = min((ran[name].median for name in REFERENCES if name in ran), default=None)
    exact = next((_vectors(ran[name]) for name in EXACT if name in ran), {})
    rows = []
    for outcome in outcomes:
        speed, failure = None, outcome.failure
        try:
            speed = _speed(outcome, lengths, reference, exact) if outcome.measured else None
        except ValueError as error:
            failure = str(error)
        about = (outcome.name, outcome.version, str(outcome.setting), outcome.contender.dense_only)
        rows.append(Row(*about, failure, speed))
    return rows


def _speed(outcome: Outcome, lengths: list[int], reference: float | None, exact: Arrays) -> Speed:
    median, vectors = outcome.median, _vectors(outcome)
    calls = [seconds for encoded in outcome.rounds for seconds in encoded.seconds]
    p50, p99 = np.percentile(calls, (50, 99)) * 1000
    return Speed(
        texts_per_second=len(lengths) / median,
        tokens_per_second=sum(lengths) / median,
        ratio=reference / median if reference else None,
        peak_mib=max(encoded.peak_bytes for encoded in outcome.rounds) / 2**20,
        dense=worst_cosine(vectors, exact, "dense"),
        colbert=worst_cosine(vectors, exact, "colbert"),
        p50_ms=float(p50),
        p99_ms=float(p99),
        rounds=outcome.seconds,
    )


def _vectors(outcome: Outcome) -> Arrays:
    with np.load(outcome.vectors) as arrays:
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


def format_table(rows: Sequence[Row]) -> str:
    """One line for each row, and why an engine did not run."""
    heads = ("engine", "setting", *_FIGURES, "rounds, seconds")
    reasons = [f"- {row.engine} did not run: {row.failure}" for row in rows if row.speed is None]
    return "\n".join([markdown(heads, map(_cells, rows)), "", *reasons]).rstrip()


def _cells(row: Row) -> list[str]:
    name, speed = row.engine + (", dense only" if row.dense_only else ""), row.speed
    if speed is None:
        return [name, row.setting, *["-"] * len(_FIGURES), "did not run"]
    figures = [(getattr(speed, field), form) for field, form in _FIGURES.values()]
    cells = ["-" if value is None else format(value, form) for value, form in figures]
    return [name, row.setting, *cells, ", ".join(f"{seconds:.2f}" for seconds in speed.rounds)]
