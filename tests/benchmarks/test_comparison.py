"""A whole comparison of what this environment has, on a tiny checkpoint."""

import sys
from pathlib import Path

import pytest

from benchmarks import environments
from benchmarks.comparison import Comparison, Plan
from benchmarks.environments import EnvironmentFailureError, interpreter
from benchmarks.workload import MIXED, Workload, draw_texts


def unreachable_index(_python: Path, requirements: Path) -> None:
    raise EnvironmentFailureError(f"{requirements.name} cannot be installed: no index")


async def test_engines_take_turns_and_one_that_cannot_start_tells_why(
    tiny_m3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "_install", unreachable_index)
    plan = Plan(
        folder=tiny_m3,
        workload=Workload(MIXED, texts=3, largest_batch=1),
        texts=draw_texts(MIXED, 3),
        rounds=2,
        environments=tmp_path / "environments",
        patience=120,
        vectors=tmp_path,
    )
    names = ["smart-embedder-float32", "flagembedding"]
    comparison = Comparison(plan, names, lambda: {"float32": 1e9})
    await comparison.run()
    ours, theirs = comparison.outcomes.values()
    assert (len(ours.rounds), ours.failure) == (2, "")
    assert comparison.vectors_file(ours).exists()
    assert theirs.failure == "requirements-peers.txt cannot be installed: no index"
    assert len(comparison.ceilings) == 2


def test_this_projects_own_environment_is_the_one_it_runs_in(tmp_path: Path) -> None:
    assert interpreter("own", tmp_path) == Path(sys.executable)


def test_an_environment_is_made_once_for_each_version_of_its_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = []
    monkeypatch.setattr(environments, "_install", lambda *arguments: installed.append(arguments))
    python = interpreter("peers", tmp_path)
    assert python.exists()
    assert interpreter("peers", tmp_path) == python
    (tmp_path / "peers" / "installed").write_text("of an older version")
    interpreter("peers", tmp_path)
    assert [requirements.name for _, requirements in installed] == ["requirements-peers.txt"] * 2
