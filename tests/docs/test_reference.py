"""What docs/ says of settings, fields, errors and messages is what the product has."""

import re

import pytest

from app import errors
from app.api.errors import status_of
from app.api.schemas import EmbeddingRequest, RerankBody
from app.errors import SmartEmbedderError, StartupError, UnavailableError
from app.settings import Settings
from launcher.gpu import CPU_LIMITS, gpu_limits
from tests.docs.sentences import can_be_said
from tests.docs.tables import code_in, rows_under
from tests.support.env_example import listed_settings
from tests.support.server import REPOSITORY

API = REPOSITORY / "docs" / "api.md"
CONFIGURATION = REPOSITORY / "docs" / "configuration.md"
TROUBLES = rows_under(REPOSITORY / "docs" / "troubleshooting.md", "it says", "it means")
# Answered by the router, which has no error of ours.
OF_THE_ROUTER = {("404", "not_found"), ("405", "method_not_allowed")}
# Nobody is there to read the one, and the other stands for those below it.
NEVER_ANSWERED = {errors.ClientGoneError, StartupError, UnavailableError}


def test_every_setting_is_explained_once_with_its_default() -> None:
    rows = rows_under(CONFIGURATION, "setting", "default", "meaning")
    defaults = listed_settings()
    explained = {code_in(name)[0]: default.strip("`") for name, default, _ in rows}
    assert len(explained) == len(rows)
    assert set(explained) == {name.upper() for name in Settings.model_fields}
    assert explained == {name: value or "not set" for name, value in defaults.items()}


def test_what_the_launcher_sets_by_the_memory_is_told() -> None:
    rows = rows_under(CONFIGURATION, "memory", "`QWEN_RERANK_BATCH_SIZE`")
    limits = [gpu_limits(6 * 1024), gpu_limits(8 * 1024), gpu_limits(24 * 1024), CPU_LIMITS]
    assert [row[1:] for row in rows] == [[str(x.batch_size), str(x.max_length)] for x in limits]


def test_every_field_is_explained_with_its_default() -> None:
    rows = rows_under(API, "field", "default", "meaning")
    fields = EmbeddingRequest.model_fields | RerankBody.model_fields
    assert [code_in(name)[0] for name, *_ in rows] == list(fields)
    for name, default, _ in rows:
        field = fields[code_in(name)[0]]
        known = "required" if field.is_required() else {None: "null"}.get(field.default)
        assert default == (known or str(field.default).lower()), name


def subclasses(kind: type[SmartEmbedderError]):
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def test_every_error_is_explained_with_its_status() -> None:
    rows = rows_under(API, "status", "code", "when")
    told = {(status, code_in(code)[0]) for status, code, *_ in rows}
    kinds = {SmartEmbedderError, *subclasses(SmartEmbedderError)} - NEVER_ANSWERED
    ours = {(str(status_of(kind(""))), kind.code) for kind in kinds}
    assert told == ours | OF_THE_ROUTER


@pytest.mark.parametrize("quote", [quote for row in TROUBLES for quote in code_in(row[0])])
def test_what_troubleshooting_quotes_can_be_said(quote: str) -> None:
    assert can_be_said(quote), quote


def test_what_is_not_in_the_sources_is_noticed() -> None:
    assert can_be_said("port ... of ... is taken: end what listens there")
    assert not can_be_said("port ... of ... is taken: buy another")
    assert not can_be_said("is taken: ... port")


def test_the_picture_tells_only_statuses_that_there_are() -> None:
    picture = (REPOSITORY / "docs" / "flow.svg").read_text(encoding="utf-8")
    shown = set(re.findall(r"\b[2-5]\d\d\b", " ".join(re.findall(r">([^<]+)</text>", picture))))
    known = {status for status, *_ in rows_under(API, "status", "code", "when")}
    assert shown == known - {"404", "405"} | {"200"}


def test_the_readmes_figures_are_those_that_were_measured() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    measured = (REPOSITORY / "docs" / "performance.md").read_text(encoding="utf-8")
    table = re.search(r"<!-- figures -->\n(.*?)<!-- /figures -->", readme, re.DOTALL)
    assert table
    rows = [line.split("|")[2:-1] for line in table[1].splitlines() if line.startswith("|")]
    figures = re.findall(r"\d[\d.,]*\d|\d", " ".join(cell for row in rows for cell in row))
    assert figures
    missing = [
        x for x in figures if not re.search(rf"(?<![\d.]){re.escape(x)}(?![\d.]*\d)", measured)
    ]
    assert not missing, f"docs/performance.md does not say {missing}"
