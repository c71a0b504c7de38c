"""Every fenced block of README.md, SECURITY.md and docs/ is run, or is marked and checked."""

import re
import shutil
from pathlib import Path

import pytest

from app.settings import Settings
from tests.docs.blocks import MARKS, Run, all_blocks, all_runs, blocks_of
from tests.docs.checkout import START, run_block
from tests.docs.outputs import check_lines, check_output, is_part, shape
from tests.docs.stand_ins import calls_of, check_call
from tests.support.server import REPOSITORY, RunningServer

RUNS = all_runs()
LAUNCHERS = re.compile(r"\./(start_server|run_tests)\.sh")


def starts_something(run: Run) -> bool:
    """Whether it would start a server, or this very suite."""
    return bool(LAUNCHERS.search(run.block.text))


def some(*languages: str, marked: bool, starts: bool = False):
    chosen = [
        run
        for run in RUNS
        if run.block.language in languages
        and bool(run.block.mark) == marked
        and (marked or starts_something(run) == starts)
    ]
    return pytest.mark.parametrize("run", chosen, ids=lambda run: run.block.place)


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    for block in all_blocks():
        assert block.mark is None or block.mark in MARKS, f"{block.place}: {block.mark}"
        kinds = {"bash", "python", "ini"} if block.mark is None else {"bash", "json", ""}
        assert block.language in kinds, f"{block.place} is neither run nor marked"
    unclaimed = {b for b in all_blocks() if b.is_output} - {run.output for run in RUNS}
    assert not unclaimed, "output of nothing"


@some("bash", "python", marked=False)
def test_a_block_runs_and_prints_what_it_shows(
    run: Run, demo: RunningServer, checkout: Path
) -> None:
    if "curl" in run.block.text and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    printed = run_block(run.block, checkout, demo.url)
    if run.output:
        check_output(run.output, printed)
    else:  # curl calls an error a success.
        assert '"detail"' not in printed


@some("bash", marked=False, starts=True)
def test_what_is_started_is_what_the_other_blocks_talk_to(run: Run, tmp_path: Path) -> None:
    for call in calls_of(run.block, tmp_path):
        check_call(call)
        if call.tool == "start_server.sh":
            assert tuple(call.arguments) == START, "mark it with what it needs"


@some("bash", "", marked=True)
def test_a_block_that_cannot_be_run_here_has_commands_that_could_be(
    run: Run, tmp_path: Path
) -> None:
    for call in calls_of(run.block, tmp_path):
        check_call(call)


@some("ini", marked=False)
def test_lines_for_dotenv_are_settings(run: Run, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(run.block.text)
    Settings(_env_file=tmp_path / ".env")
    names = re.findall(r"(?m)^(\w+)=", run.block.text)
    assert names
    assert {name.lower() for name in names} <= set(Settings.model_fields)


def collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setattr("tests.docs.blocks.REPOSITORY", tmp_path)
    (tmp_path / "page.md").write_text(text)
    return [(b.line, b.language, b.text, b.mark) for b in blocks_of(tmp_path / "page.md")]


def test_marks_belong_to_the_line_before_the_fence(tmp_path: Path, monkeypatch) -> None:
    text = "<!-- needs Docker -->\n```bash\na\n```\n<!-- output -->\n\n  ```\n  b\n   c\n  ```\n"
    assert collected(tmp_path, monkeypatch, text) == [
        (2, "bash", "a", "needs Docker"),
        (7, "", "b\n c", None),
    ]


def test_a_fence_that_is_not_closed_is_found(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(AssertionError, match="not closed"):
        collected(tmp_path, monkeypatch, "```bash\na\n")


def test_numbers_may_differ_and_words_may_not() -> None:
    check_lines("took 3 ms\n...\nend", "log\ntook 4.5 ms\nx\ny\nend\n")
    for printed in ("took 3 s\nend", "took 3 ms\n", "end\ntook 3 ms"):
        with pytest.raises(AssertionError):
            check_lines("took 3 ms\n...\nend", printed)
    with pytest.raises(AssertionError, match="something stands before 'b'"):
        check_lines("a\nb", "a\nx\nb")


def test_json_is_compared_by_its_keys() -> None:
    whole = shape({"a": [{"b": 1, "c": None}], "d": {"12": 0.5}})
    assert whole == {"a": [{"b": "number", "c": "NoneType"}], "d": {"#": "number"}}
    assert is_part(shape({"a": [{"b": 2}]}), whole)
    assert not is_part(shape({"a": [{"x": 2}]}), whole)
    assert not is_part(shape({"a": [{"b": "2"}]}), whole)


def test_documents_stand_where_they_are_looked_for() -> None:
    assert (REPOSITORY / "README.md").is_file()
    assert {block.file for block in all_blocks()} >= {"README.md", "docs/api.md"}
