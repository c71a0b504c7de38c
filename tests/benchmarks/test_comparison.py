"""Comparisons of the engines in this environment, on a tiny checkpoint."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import comparison as comparing
from benchmarks.adapters import Setting, batch_by_length
from benchmarks.comparison import (
    CATALOGUE,
    OWN,
    Contender,
    Outcome,
    Plan,
    compare,
    create_environment,
)
from benchmarks.worker import EngineFailureError
from benchmarks.workload import WORKLOADS, alternate
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


def test_an_environment_is_created_once_for_each_version_of_its_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = []
    monkeypatch.setattr(comparing, "_install", lambda *arguments: installed.append(arguments))
    python = create_environment("peers", tmp_path)
    assert python.exists()
    assert create_environment("peers", tmp_path) == python
    (tmp_path / "peers" / "installed").write_text("of an older version")
    create_environment("peers", tmp_path)
    assert [requirements.name for _, requirements in installed] == ["peers.txt"] * 2
    assert create_environment("own", tmp_path) == Path(sys.executable)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_engine_has_a_setting_for_every_workload(workload: str) -> None:
    facts = WORKLOADS[workload]
    for contender in CATALOGUE.values():
        settings = contender.settings_for(workload, texts=4)
        assert all((setting.batch or 1) <= min(facts.largest_batch, 4) for setting in settings)
        assert len(settings) == 1 if facts.one_at_a_time else settings


def test_batches_hold_texts_of_similar_length_and_each_text_once() -> None:
    texts = ["aa", "a" * 9, "a", "a" * 8, "aaa"]
    assert list(batch_by_length(texts, 2)) == [[1, 3], [4, 0], [2]]
    assert [str(Setting()), str(Setting(8, "throughput"))] == ["default", "batch 8 throughput"]


def test_engines_alternate_and_leave_when_their_rounds_are_over() -> None:
    assert [*alternate({"a": 3, "b": 1, "c": 2})] == ["a", "b", "c", "a", "c", "a"]
