"""The GPU report: sections with time limits, tables and aims."""

import sys
from dataclasses import replace

import pytest

from benchmarks.gpu.report import (
    AIMS,
    Outcome,
    Section,
    compare_with_aims,
    main,
    render_page,
    run,
)

pytestmark = pytest.mark.long

FIGURES = "import json, os; print('hello'); print(json.dumps({'name': os.environ['NAME']}))"
ENDLESS = "import time; print('began', flush=True); time.sleep(600)"


@pytest.mark.parametrize(
    ("code", "seconds", "status", "figures", "texts"),
    [
        (FIGURES, 30, 0, {"name": "one"}, ""),
        ("raise SystemExit('no such device')", 30, 1, None, "**failed** (1)|no such device"),
        (ENDLESS, 2, None, None, "**not finished**|began"),
        # Its child process is ended, too: otherwise it would keep the pipe open.
        ("import os; os.system('sleep 600')", 0.5, None, None, "**not finished**"),
    ],
)
def test_a_section_has_the_figures_of_its_last_line_or_its_output(
    code: str, seconds: float, status: int | None, figures: object, texts: str
) -> None:
    section = Section("a section", [sys.executable, "-c", code], 5.0, {"NAME": "one"})
    outcome = run(section, seconds)
    assert (outcome.status, outcome.figures) == (status, figures)
    assert all(text in render_page([outcome]) for text in texts.split("|"))
    # A section without figures may print anything.
    assert status != 0 or run(replace(section, figures=False), seconds).figures is None


def rates(**tokens_per_second: float) -> list[dict[str, object]]:
    return [
        {"tokens": tokens, "kinds": kinds, "tokens_per_second": rate * tokens / 256}
        for kinds, rate in tokens_per_second.items()
        for tokens in (128, 256)
    ]


def test_figures_stand_beside_their_aims() -> None:
    engines = {"torch": "2.13", "rates": rates(**{"dense": 4e5, "all kinds": 1e5})}
    outcomes = [
        Outcome("engines", 1.0, 0, engines | {"lone_query": {"p50_ms": 1.5}}, ""),
        Outcome("http_rate", 1.0, 0, {"tokens_per_second": 3e5}, ""),
        Outcome("float8", 1.0, 1, None, "no GPU"),
    ]
    assert list(compare_with_aims(outcomes)) == [
        ("dense", 4e5, AIMS["dense"]),
        ("all kinds", 1e5, AIMS["all kinds"]),
        ("HTTP of dense", 0.75, AIMS["HTTP of dense"]),
        ("lone query, ms", 1.5, AIMS["lone query, ms"]),
    ]
    assert "## Aims\n" in render_page(outcomes)
    assert "## Aims" not in render_page([])


def test_an_unknown_section_is_an_error_before_anything_runs(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path), "--device", "cpu", "--only", "tset"])
    with pytest.raises(SystemExit):
        main()
    message = capsys.readouterr().err
    assert "there is no section tset" in message
    assert "verify" in message
    assert not list(tmp_path.iterdir())
