"""`python -m tools.capacity` as a user runs it, with times of a file and with a real service."""

from pathlib import Path

import pytest

from smart_embedder.engine.scheduling.batcher import Limits
from tests.support.server import REPOSITORY, RunningServer
from tools.capacity import __main__ as tool
from tools.capacity.cost import CostModel, Load, MeasuredTime, TimeTable, read_times, uniform
from tools.capacity.simulation import Devices, Target, options

COST = CostModel((0.01, 0.0, 0.0, 0.0))
DEVICES = Devices(COST, Limits(10**6, max_requests=1))


@pytest.fixture
def times(tmp_path: Path) -> Path:
    """A device on which any request takes 10 ms."""
    made = [MeasuredTime(texts, 30, 0.01, 0.0, 0.0) for texts in (1, 4)]
    path = tmp_path / "times.json"
    TimeTable("dense", "a device", 30, overlapping=False, times=made).write(path)
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    def run_tool(*arguments: str | Path) -> int:
        few = ("--requests", "800")
        monkeypatch.setattr("sys.argv", ["capacity", *map(str, (*few, *arguments))])
        return tool.main()

    return run_tool


def test_more_devices_and_replicas_are_added_until_the_target_is_met() -> None:
    load = Load(250, uniform(1, 1))
    target = Target(p50=None, p99=0.04)
    devices, replicas = (
        options(load, DEVICES, target, 1000, replicas=each) for each in (False, True)
    )
    # Three hold the load; one queue for all needs fewer than a queue for each.
    assert [each.meets for each in devices] == [False] * (len(devices) - 1) + [True]
    assert [each.meets for each in replicas] == [False] * (len(replicas) - 1) + [True]
    assert 3 <= devices[-1].devices <= replicas[-1].replicas <= 6
    assert devices[-1].outcome.percentile(99) <= 0.04


def test_it_tells_devices_and_replicas(run, times: Path, capsys) -> None:
    load = ("--rate", "150", "--tokens", "30", "--kinds", "dense")
    assert run("--times", times, *load, "--p99-ms", "50") == 0
    told = capsys.readouterr().out
    assert "150 requests/s of 1 texts, dense, on a device" in told
    assert "Devices behind one queue that are needed: 2." in told
    assert "Replicas that are needed: " in told
    # A target below a lone request, which no number reaches.
    assert run("--times", times, "--rate", "5", *load[2:], "--p50-ms", "5") == 1
    assert "reaches P50 of 5 ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "x"], "'x' is no distribution of tokens"),
        (["--tokens", "30", "--kinds", "rerank"], "these times are of dense, and the load is of"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(
    run, times: Path, arguments: list[str], message: str, capsys
) -> None:
    assert run("--times", times, "--rate", "1", "--p50-ms", "9", *arguments) == 2
    assert message in capsys.readouterr().err


def test_what_is_missing_is_asked_for_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    answers = iter(["20", "30:90", "100"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    given = tool.parse([])
    assert (given.rate, given.tokens, given.p99_ms) == (20, "30:90", 100)
    monkeypatch.setattr("builtins.input", lambda _: "many")
    with pytest.raises(SystemExit):
        tool.parse([])
    assert "'many' is no number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--rate 5 --tokens 30", "--p99-ms is missing"),
        ("--rate 0 --tokens 30 --p50-ms 9", "--rate must be above 0"),
        ("--rate 5 --tokens 30 --p50-ms 9 --max-queue-size 0", "--max-queue-size must be above 0"),
        ("--rate 5 --tokens 30 --p50-ms 9 --save /no/where/a", "--save: the folder of /no/where/a"),
        ("--url localhost:8000", "'localhost:8000' is not an http:// or https:// address"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments: str, told: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    with pytest.raises(SystemExit):
        tool.parse(arguments.split())
    assert told in capsys.readouterr().err


def test_its_own_service_is_measured_with_a_token_and_a_cache_in_force(
    run, tiny_m3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.capacity.measure._SECONDS", 0.0)
    monkeypatch.setattr("tools.capacity.measure._LENGTHS", (8, 96))
    monkeypatch.chdir(tmp_path)
    settings = {"EMBEDDING_MODEL": str(tiny_m3), "RERANKER_MODEL": "none", "DEVICE": "cpu"}
    settings |= {"API_TOKEN": "a-token-of-the-users", "EMBEDDING_CACHE": "memory"}
    settings |= {"PROTECT_METRICS": "true", "PYTHONPATH": str(REPOSITORY)}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    saved, load = tmp_path / "times.json", ("--rate", "0.001", "--tokens", "9", "--kinds", "dense")
    assert run(*load, "--p99-ms", "60000", "--save", saved) == 0
    assert all(each.forward > 0 for each in read_times(saved).times)


@pytest.mark.parametrize("kinds", ["dense", "rerank"])
def test_a_running_service_is_measured(
    run, server: RunningServer, tmp_path: Path, kinds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.capacity.measure._SECONDS", 0.0)
    monkeypatch.setattr("tools.capacity.measure._LENGTHS", (8, 96))
    monkeypatch.setattr("tools.capacity.measure._ROUNDS", 1)
    saved, texts = tmp_path / "times.json", tmp_path / "texts.jsonl"
    texts.write_text('{"text": "one"}\n\n{"text": "some more words than one"}\n')
    load = ("--rate", "0.001", "--texts-file", texts, "--texts", "2", "--kinds", kinds)
    assert run("--url", server.url, *load, "--p99-ms", "60000", "--save", saved) == 0
    table = read_times(saved)
    assert (table.kinds, table.overlapping) == (kinds, False)
    assert {each.texts for each in table.times} == {1, 4, 16}
    assert all(each.forward > 0 for each in table.times)


def test_a_service_that_is_away_or_cannot_start_is_one_sentence(
    run, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    load = ("--rate", "1", "--tokens", "30", "--p50-ms", "9", "--kinds", "dense")
    assert run("--url", "http://127.0.0.1:9", *load) == 2
    assert "cannot reach" in capsys.readouterr().err
    monkeypatch.setenv("DTYPE", "float17")
    assert run(*load) == 2
    assert "the service did not start: " in capsys.readouterr().err
