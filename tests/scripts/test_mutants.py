"""The faults that `scripts.mutate` plants: each changes the code, and none changes what is said."""

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.mutants import draw, mutants_below, mutants_of

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = mutants_below(ROOT)
SOURCE = '''
"""Text, which is 1 of 2 things."""
__all__ = ["waits"]

@dataclass(frozen=True)
class Queue:
    limit: int = 3

    def waits(self, job: "Job", most=1.5) -> bool:
        """Whether 2 > 1."""
        log.info("waiting", jobs=1 + 1)
        assert len(self) > 0
        if job is None or not job.done:
            raise ValueError(f"{1 + 1}" if job else "2 > 1")
        self.last = job
        return self.limit > max(len(self), 7_000) - take(job, most, daemon=True)
'''


def named(source: str) -> set[str]:
    return {
        f"{each.kind}: {each.before} -> {each.after}"
        for each in mutants_of("queue.py", source.encode())
    }


def test_each_place_that_means_something_is_changed_and_nothing_else() -> None:
    total = "max(len(self), 7_000) - take(job, most, daemon=True)"
    unparsed = total.replace("7_000", "7000")
    assert named(SOURCE) == {
        "number: 3 -> 4",
        "number: 3 -> 2",
        "and/or: job is None or not job.done -> (job is None and (not job.done))",
        "condition: job is None or not job.done -> (not (job is None or not job.done))",
        "comparison: job is None -> (job is not None)",
        "condition: not job.done -> (job.done)",
        'raise left out: raise ValueError(f"{1 + 1}" if job else "2 > 1") -> pass',
        "assignment left out: self.last = job -> pass",
        f"return None: self.limit > {total} -> None",
        f"comparison: self.limit > {total} -> (self.limit >= {unparsed})",
        f"arithmetic: {total} -> ({unparsed.replace(' - ', ' + ')})",
        "min/max: max -> min",
        "arguments swapped: take(job, most, daemon=True) -> take(most, job, daemon=True)",
    }


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("for a in b:\n    continue", {"loop: continue -> break"}),
        ("try:\n    a\nfinally:\n    f()", {"finally left out: f() -> pass"}),
        ("try:\n    a\nexcept E:\n    b\n    c", {"except left out: b\n    c -> pass"}),
        ("a = [b for b in c if b.d]", {"condition: b.d -> (not (b.d))"}),
        ("async def f():\n    await g()", {"call left out: await g() -> pass"}),
        ("def f(a=True): ...", {"boolean: True -> False"}),
        ("def f(a, *, b):\n    del a, b\n    del c", {"del left out: del c -> pass"}),
        ("a = 'ä' if b else c", {"condition: b -> (not (b))"}),
    ],
)
def test_a_statement_of_each_kind(source, changed) -> None:
    assert named(source) == changed


@given(st.sampled_from(MUTANTS))
def test_a_fault_anywhere_leaves_a_file_that_can_be_read_and_does_something_else(mutant) -> None:
    source = (ROOT / mutant.file).read_bytes()
    changed = ast.dump(ast.parse(mutant.applied_to(source)))
    assert changed != ast.dump(ast.parse(source))


def test_a_seed_draws_the_same_and_another_seed_others() -> None:
    first = draw(list(MUTANTS), 1, 50)
    assert first == draw(list(MUTANTS), 1, 50)
    assert len({each.name for each in first}) == 50
    assert not set(first) <= set(draw(list(MUTANTS), 2, 50))
