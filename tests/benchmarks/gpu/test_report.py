"""The GPU report: a section that fails or never ends costs itself alone."""

import json
import sys
from pathlib import Path

from benchmarks.gpu.page import page
from benchmarks.gpu.report import Section, run, sections


def section(code: str, *, figures: bool = True) -> Section:
    return Section("a section", [sys.executable, "-c", code], 5.0, {"NAME": "value"}, figures)


def test_the_figures_are_the_last_line() -> None:
    code = "import json, os; print('hello'); print(json.dumps({'name': os.environ['NAME']}))"
    outcome = run(section(code), 30)
    assert (outcome.status, outcome.figures) == (0, {"name": "value"})


def test_a_section_that_fails_says_why() -> None:
    outcome = run(section("raise SystemExit('no such device')"), 30)
    assert (outcome.status, outcome.figures) == (1, None)
    assert "no such device" in outcome.said
    assert "**failed** (1)" in page([vars_of(outcome)])
    assert "no such device" in page([vars_of(outcome)])


def test_a_section_that_does_not_end_is_ended() -> None:
    code = "import time; print('began', flush=True); time.sleep(600)"
    outcome = run(section(code), 2)
    assert outcome.status is None
    assert "began" in outcome.said
    assert "**not finished**" in page([vars_of(outcome)])


def test_what_a_section_has_started_ends_with_it() -> None:
    """It would compute beside the next section; here it also holds on to the pipe."""
    code = "import os; os.system('sleep 600')"
    assert run(section(code), 0.5).status is None


def test_a_section_without_figures_may_print_anything() -> None:
    assert run(section("print('7 passed')", figures=False), 30).figures is None


def test_correctness_comes_before_speed(tmp_path) -> None:
    names = [each.name for each in sections(tmp_path, "cuda", quick=False)]
    assert max(map(names.index, ("tests", "verify"))) < names.index("kernels embedder")
    assert len(names) == len(set(names))


def test_the_tests_are_those_for_devices(tmp_path) -> None:
    by_name = {each.name: each for each in sections(tmp_path, "cuda", quick=False)}
    modules = {Path(each).name for each in by_name["tests"].command}
    assert {"test_backend.py", "test_devices.py"} <= modules


def test_how_a_query_is_launched_is_a_table() -> None:
    rows = [{"launch": "graphs", "switch_ms": 0.1}, {"launch": "eager", "switch_ms": 0.1}]
    outcome = run(section(f"import json; print(json.dumps({rows}))"), 30)
    shown = page([vars_of(outcome) | {"name": "launching"}])
    assert "| launch | switch_ms |" in shown
    assert "| graphs | 0.100 |" in shown


def vars_of(outcome) -> dict:
    return json.loads(json.dumps({name: getattr(outcome, name) for name in outcome.__slots__}))
