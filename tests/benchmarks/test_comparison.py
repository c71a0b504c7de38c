"""Comparisons of the engines in this environment, on a tiny checkpoint."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import comparison as comparing
from benchmarks.comparison import (
    CATALOGUE,
    OWN,
    Contender,
    Outcome,
    Plan,
    compare,
)
from benchmarks.worker import EngineFailureError
from tests.support.checkpoints import plain_corpus


@pytest.fixture
def plan(tiny_m3: Path, tmp_path: Path) -> Plan:
    texts = {"mixed": plain_corpus(lines=4), "documents": plain_corpus(lines=1)}
    return Plan(tiny_m3, texts, 1, 120, tmp_path, environments=tmp_path / "made")


def run(plan: Plan, *names: str) -> list[Outcome]:
    outcomes = [Outcome(name) for name in names]
    compare(plan, outcomes)
    return outcomes


def test_a_failed_engine_has_a_reason_and_others_run_with_the_fastest_setting(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable_index(_python: Path, requirements: Path) -> None:
        raise EngineFailureError(f"{requirements.name} cannot be installed: no index")

    monkeypatch.setattr(comparing, "_install", unreachable_index)
    tuned = Contender("smart_embedder", "float32", environment=OWN, slow=True)
    monkeypatch.setitem(CATALOGUE, "tuned", tuned)
    outcome, theirs = run(plan, "tuned", "flagembedding")
    assert (theirs.failure, theirs.measured) == ("peers.txt cannot be installed: no index", False)
    trials = [line for line in capsys.readouterr().err.splitlines() if "trial" in line]
    seconds = {int(line.split()[2].strip(",:")): float(line.split()[3]) for line in trials}
    assert outcome.measured
    assert seconds.keys() == {1, 4}
    assert seconds[outcome.settings["mixed"]["batch"]] == min(seconds.values())
    # Slow engines skip the documents.
    assert outcome.rounds.keys() == {"mixed"}


def test_an_interrupted_comparison_continues_with_the_missing_turns(plan: Plan) -> None:
    plan, outcome = replace(plan, rounds=2), Outcome("smart-embedder-bfloat16")
    saved: list[int] = []

    def stop_after_a_turn() -> None:
        saved.append(outcome.turns)
        if outcome.turns == len(saved) - 1 == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(plan, [outcome], stop_after_a_turn)
    outcome = Outcome(**json.loads(json.dumps(asdict(outcome))))
    compare(replace(plan, until=0), [outcome])
    assert outcome.turns == 1
    compare(plan, [outcome])
    assert outcome.turns == len(outcome.rounds["documents"]) == 2
    assert (outcome.rounds.keys(), outcome.failure) == (plan.texts.keys(), "")
