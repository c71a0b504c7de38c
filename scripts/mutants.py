"""Small faults that `scripts.mutate` plants in smart_embedder/, one by one: where, what changes.

What is changed: a comparison or its limit, `and` and `or`, a condition turned round, a small
number by one, a boolean, `+` and `-`, `min` and `max`, the first two arguments of a call, a call
or an assignment to something that outlives the function left out, `raise` left out, `return None`,
`break` and `continue`, the body of an `except` or a `finally` left out.

What is not, since it cannot mean anything or is no code of ours to test:

- the kernels: models/ops/csrc, and what needs NVRTC and a GPU to run at all (`KERNELS`);
- schemas that only describe answers for the OpenAPI page (`DESCRIPTIONS`);
- docstrings, annotations, decorators, `__all__`, `__repr__`, assertions, protocols, text of any
  kind (messages, f-strings, what a `raise` says), calls of the log, `TYPE_CHECKING` blocks;
- numbers above `MOST_COUNTED` and fractions: a limit of 65,536 bytes or of 0.7 seconds that is off
  by one is as good a limit;
- arguments that only name or describe, or that check the programmer (`NOT_MEANT`), and `del` of
  parameters, which says that they are not used.
"""

import ast
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KERNELS = "smart_embedder/models/ops/cuda.py"
DESCRIPTIONS = "smart_embedder/api/answers.py"
MOST_COUNTED = 16
NOT_MEANT = {
    "daemon", "description", "exc_info", "examples", "frozen", "indent", "init",
    "json_schema_extra", "kw_only", "name", "responses", "slots", "stacklevel", "strict", "summary",
    "title",
}  # fmt: skip
_LOGS = {"log", "logger", "_log", "warnings"}
_COMPARED = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
_OPPOSITES = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
_TURNED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult}
_SWAPPED_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
# The order of their arguments does not count, or a wrong one never gets past the first call.
_ORDERLESS = {*_SWAPPED_CALLS, "isinstance", "issubclass", "getattr", "hasattr", "cast", "zip"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: the bytes from `start` to `end` of `file` become `after`."""

    file: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    end: int

    def applied_to(self, source: bytes) -> bytes:
        """The changed file."""
        return source[: self.start] + self.after.encode() + source[self.end :]

    @property
    def name(self) -> str:
        """Where, and what: `file:line kind: before -> after`."""
        before, after = (" ".join(text.split())[:100] for text in (self.before, self.after))
        return f"{self.file}:{self.line} {self.kind}: {before} -> {after}"


def mutants_below(root: Path, folder: str = "smart_embedder") -> list[Mutant]:
    """Every mutant of the Python files below a folder, in a fixed order."""
    paths = sorted((root / folder).rglob("*.py")) if (root / folder).is_dir() else [root / folder]
    files = [str(path.relative_to(root)) for path in paths]
    kept = [file for file in files if file not in {KERNELS, DESCRIPTIONS}]
    return [each for file in kept for each in mutants_of(file, (root / file).read_bytes())]


def mutants_of(file: str, source: bytes) -> Iterator[Mutant]:
    """Those of one file, none twice."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    seen = set()
    for target, kind, after in _changes(ast.parse(source).body):
        first, last = (target, target) if isinstance(target, ast.AST) else (target[0], target[-1])
        start = starts[first.lineno - 1] + first.col_offset
        end = starts[(last.end_lineno or 0) - 1] + (last.end_col_offset or 0)
        before = source[start:end].decode()
        if (start, end, after) in seen or after == before:
            continue
        seen.add((start, end, after))
        yield Mutant(file, first.lineno, kind, before, after, start, end)


def draw(mutants: list[Mutant], seed: int, count: int) -> list[Mutant]:
    """So many of them, none twice, a kind by the square root of how many of it there are."""
    rng = random.Random(seed)
    kinds: dict[str, list[Mutant]] = defaultdict(list)
    for each in mutants:
        kinds[each.kind].append(each)
    weights = {kind: len(members) ** 0.5 for kind, members in kinds.items()}
    for members in kinds.values():
        rng.shuffle(members)
    drawn: list[Mutant] = []
    while len(drawn) < count and any(kinds.values()):
        left = [kind for kind in kinds if kinds[kind]]
        (kind,) = rng.choices(left, [weights[each] for each in left])
        drawn.append(kinds[kind].pop())
    return drawn


_Target = ast.expr | ast.stmt | list[ast.stmt]
_Change = tuple[_Target, str, str]


def _changes(body: list[ast.stmt]) -> Iterator[_Change]:
    """What can be changed in these statements and in those inside them."""
    for statement in body:
        if _is_meaningless(statement):
            continue
        yield from _of_statement(statement)
        for expression in _expressions(statement):
            yield from _of_expression(expression)
        for name in ("body", "orelse", "finalbody"):
            inside = getattr(statement, name, [])
            yield from _changes([each for each in inside if not _is_unused(each, statement)])
        for handler in getattr(statement, "handlers", []):
            yield from _changes(handler.body)
        for case in getattr(statement, "cases", []):
            yield from _changes(case.body)


def _is_meaningless(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(ast.Call(func)):
            return _root(func) in _LOGS
        case ast.ClassDef(bases=bases):
            return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in bases)
        case (
            ast.Assert()
            | ast.Import()
            | ast.ImportFrom()
            | ast.Expr(ast.Constant())
            | ast.If(test=ast.Name("TYPE_CHECKING"))
            | ast.Assign([ast.Name("__all__" | "__slots__")])
            | ast.FunctionDef(name="__repr__")
        ):
            return True
    return False


def _is_unused(statement: ast.stmt, function: ast.stmt) -> bool:
    """Whether all that it does is to say that parameters of the function are not used."""
    match statement, function:
        case ast.Delete(targets), ast.FunctionDef(args=own) | ast.AsyncFunctionDef(args=own):
            names = {each.arg for each in (*own.args, *own.kwonlyargs)}
            return all(isinstance(each, ast.Name) and each.id in names for each in targets)
    return False


def _root(expression: ast.expr) -> str:
    """The first name of `a.b.c()`, or the attribute after `self`."""
    names: list[str] = []
    while isinstance(expression, ast.Attribute | ast.Call):
        if isinstance(expression, ast.Attribute):
            names.append(expression.attr)
        expression = expression.value if isinstance(expression, ast.Attribute) else expression.func
    names.append(expression.id if isinstance(expression, ast.Name) else "")
    return names[-2] if names[-1] in {"self", "cls"} and len(names) > 1 else names[-1]


def _of_statement(statement: ast.stmt) -> Iterator[_Change]:
    if what := _may_be_left_out(statement):
        yield statement, f"{what} left out", "pass"
    match statement:
        case ast.Break() | ast.Continue():
            yield statement, "loop", "continue" if isinstance(statement, ast.Break) else "break"
        case ast.Return(ast.expr() as value) if not isinstance(value, ast.Constant):
            yield value, "return None", "None"
        case ast.If(test=test) | ast.While(test=test):
            yield from _negated(test)
        case ast.Try(handlers=handlers, finalbody=final):
            for body in [handler.body for handler in handlers]:
                if not isinstance(body[0], ast.Pass | ast.Raise):
                    yield body, "except left out", "pass"
            if final:
                yield final, "finally left out", "pass"


def _may_be_left_out(statement: ast.stmt) -> str:
    match statement:
        case ast.Expr(ast.Call() | ast.Await(ast.Call())):
            return "call"
        case ast.Assign([ast.Attribute() | ast.Subscript()]) | ast.AugAssign():
            return "assignment"
        case ast.Delete() | ast.Raise():
            return "del" if isinstance(statement, ast.Delete) else "raise"
    return ""


def _negated(test: ast.expr) -> Iterator[_Change]:
    """The condition turned round, where changing its operator does not do just that."""
    match test:
        case ast.Compare(ops=[op]) if isinstance(op, _OPPOSITES):
            return
        case ast.UnaryOp(op=ast.Not()):
            return
        case _:
            yield test, "condition", f"(not ({ast.unparse(test)}))"


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement itself that mean something, with those inside them."""
    found: list[ast.expr | None] = []
    match statement:
        case ast.Raise() | ast.ClassDef():
            pass
        case ast.FunctionDef(args=arguments) | ast.AsyncFunctionDef(args=arguments):
            found = [*arguments.defaults, *arguments.kw_defaults]
        case ast.AnnAssign(value=value):
            found = [value]
        case ast.Match(subject=subject, cases=cases):
            found = [subject, *(case.guard for case in cases)]
        case ast.With(items=items) | ast.AsyncWith(items=items):
            found = [item.context_expr for item in items]
        case _:
            found = [e for e in ast.iter_child_nodes(statement) if isinstance(e, ast.expr)]
    for each in found:
        yield from _inside(each)


def _inside(node: ast.AST | None) -> Iterator[ast.expr]:
    """An expression and its parts, less f-strings (they have no places) and what is NOT_MEANT."""
    if node is None or isinstance(node, ast.JoinedStr):
        return
    if isinstance(node, ast.keyword) and node.arg in NOT_MEANT:
        return
    if isinstance(node, ast.Call) and _root(node.func) in _LOGS:
        return
    if isinstance(node, ast.expr):
        yield node
    for each in ast.iter_child_nodes(node):
        yield from _inside(each)


def _of_expression(node: ast.expr) -> Iterator[_Change]:
    match node:
        case ast.Constant(bool(value)):
            yield node, "boolean", str(not value)
        case ast.Constant(int(value)) if value <= MOST_COUNTED:
            yield node, "number", str(value + 1)
            if value:
                yield node, "number", str(value - 1)
        case ast.Call():
            yield from _of_call(node)
        case ast.IfExp(test=test):
            yield from _negated(test)
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            for test in [test for generator in node.generators for test in generator.ifs]:
                yield from _negated(test)
        case _:
            yield from _of_operator(node)


def _of_call(node: ast.Call) -> Iterator[_Change]:
    match node:
        case ast.Call(ast.Name(name) as func) if name in _SWAPPED_CALLS:
            yield func, "min/max", _SWAPPED_CALLS[name]
        case ast.Call(func, [first, second, *rest], keywords):
            starred = any(isinstance(each, ast.Starred) for each in (first, second))
            if not starred and _root(func) not in _ORDERLESS:
                swapped = ast.Call(func, [second, first, *rest], keywords)
                yield node, "arguments swapped", ast.unparse(swapped)


def _of_operator(node: ast.expr) -> Iterator[_Change]:
    match node:
        case ast.Compare(left, [op], [right]):
            changed = ast.Compare(left, [_COMPARED[type(op)]()], [right])
            yield node, "comparison", f"({ast.unparse(changed)})"
        case ast.BoolOp(op, values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield node, "and/or", f"({ast.unparse(ast.BoolOp(other, values))})"
        case ast.UnaryOp(ast.Not(), operand):
            yield node, "condition", f"({ast.unparse(operand)})"
        case ast.BinOp(left, op, right) if type(op) in _TURNED and not _is_text(left, right):
            changed_sum = ast.BinOp(left, _TURNED[type(op)](), right)
            yield node, "arithmetic", f"({ast.unparse(changed_sum)})"


def _is_text(*operands: ast.expr) -> bool:
    """Whether one is a text: joined with anything else, not added."""
    return any(
        isinstance(each, ast.JoinedStr)
        or (isinstance(each, ast.Constant) and isinstance(each.value, str | bytes))
        for each in operands
    )
