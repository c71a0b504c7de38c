"""Writes .env.example and the tables of docs/configuration.md from the declared settings.

    python -m scripts.settings_docs

In docs/configuration.md only what stands between `<!-- settings: TITLE -->` and
`<!-- /settings -->` is replaced, by the table of the section with that title.
"""

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from app.settings import default, meaning, sections, without_markup

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / ".env.example"
PAGE = ROOT / "docs" / "configuration.md"
COMPOSE_TITLE = "Read by docker compose, and not by the service"
LIBRARY_TITLE = "Read by libraries of the service"
_WIDTH = 100
_HEAD = """\
# Every setting with its default. Copy to .env and take the # away from what you change.
# An empty value counts as not set; a wrong one stops the start and says what is allowed, and so
# does a name that is not in this file. Every setting is a flag, too:
# python -m app --max-queue-size 50
# Made by scripts/settings_docs.py from app/settings.py.
"""
_PLACE = re.compile(r"(<!-- settings: ([^\n]+) -->\n).*?(<!-- /settings -->)", re.DOTALL)


class Variable(NamedTuple):
    """A variable that is no setting: its name, its default and what it is."""

    name: str
    default: str
    description: str


COMPOSE_VARIABLES = (
    Variable(
        "MEMORY_LIMIT",
        "16g",
        "the most memory of the service; above it, its container is ended and started again",
    ),
    Variable("MONITORING_MEMORY_LIMIT", "1g", "the same for Prometheus and for Grafana"),
    Variable("QDRANT_MEMORY_LIMIT", "4g", "the same for Qdrant"),
    Variable("HTTPS_MEMORY_LIMIT", "1g", "the same for the proxy of HTTPS"),
    Variable("PIDS_LIMIT", "2048", "the most threads of a container"),
    Variable(
        "STOP_GRACE_PERIOD",
        "40s",
        "how long compose waits before it kills; it must be above `SHUTDOWN_TIMEOUT`",
    ),
    Variable("HF_CACHE_VOLUME", "smart-embedder-hf-cache", "the volume of downloaded models"),
    Variable(
        "MODELS_FOLDER",
        "./deploy/models",
        "the folder that is mounted read-only at `/models`: for models that are folders, and for "
        "the file of `MODELS`; in the settings their paths begin with `/models`",
    ),
    Variable(
        "DOMAIN", "localhost", "the name whose certificate the proxy of the profile `https` fetches"
    ),
    Variable(
        "HTTPS_NETWORK",
        "192.0.2",
        "the first three numbers of the addresses of that proxy and of the service; a second "
        "project on one machine needs others",
    ),
    Variable("PROMETHEUS_PORT", "9090", "the port of Prometheus on this machine"),
    Variable("GRAFANA_PORT", "3000", "the port of Grafana on this machine"),
    Variable("QDRANT_PORT", "6333", "the port of Qdrant's REST API on this machine"),
    Variable("QDRANT_GRPC_PORT", "6334", "the port of Qdrant's gRPC API on this machine"),
    Variable("QDRANT__SERVICE__API_KEY", "", "the key that Qdrant asks its clients for"),
    Variable("COMPOSE_FILE", "", "the same as compose's flag -f"),
    Variable("COMPOSE_PROFILES", "", "the same as compose's flag --profile"),
    Variable("COMPOSE_PROJECT_NAME", "smart-embedder", "the same as compose's flag -p"),
)
LIBRARY_VARIABLES = (
    Variable(
        "HF_TOKEN",
        "",
        "the token that the hub is shown, for private models and for those whose terms must be "
        "accepted first; it is never logged",
    ),
    Variable("HF_ENDPOINT", "", "the address of another hub; not set, huggingface.co"),
    Variable(
        "HTTPS_PROXY",
        "",
        "the proxy through which the hub is asked, such as `http://proxy:3128`, and an "
        "`OTLP_ENDPOINT`, too, unless `NO_PROXY` has its host; it may hold a user and a password, "
        "and is never logged",
    ),
    Variable("HTTP_PROXY", "", "the same for addresses that begin with `http://`"),
    Variable("NO_PROXY", "", "hosts, separated by commas, that are asked without a proxy"),
    Variable(
        "PYTORCH_CUDA_ALLOC_CONF",
        "expandable_segments:True",
        "options of PyTorch's memory allocator on a GPU; PyTorch's newer variable, "
        "`PYTORCH_ALLOC_CONF`, wins",
    ),
    Variable("OTEL_SERVICE_NAME", "smart-embedder", "the service's name in its traces"),
)


def env_example() -> str:
    """The whole of .env.example."""
    groups = tables() | {COMPOSE_TITLE: COMPOSE_VARIABLES}
    return "\n".join([_HEAD, *(_section(title, rows) for title, rows in groups.items())])


def tables() -> dict[str, tuple[Variable, ...]]:
    """The variables in each table of docs/configuration.md: the settings, and the libraries'."""
    settings = {
        title: tuple(Variable(name.upper(), default(name), meaning(name)) for name in names)
        for title, names in sections().items()
    }
    return settings | {LIBRARY_TITLE: LIBRARY_VARIABLES}


def _section(title: str, variables: Iterable[Variable]) -> str:
    lines = [f"# --- {title} ---"]
    for name, value, text in variables:
        sentence = without_markup(text[0].upper() + text[1:] + ".")
        lines += textwrap.wrap(sentence, _WIDTH, initial_indent="# ", subsequent_indent="# ")
        lines.append(f"# {name}={value}")
    return "\n".join(lines) + "\n"


def with_tables(page: str) -> str:
    """A page with the table of each section in its place; `ValueError` where one has none."""
    places = [title for _, title, _ in _PLACE.findall(page)]
    if sorted(places) != sorted(tables()):
        raise ValueError(f"{PAGE.name} has places for {places}, and the tables are {[*tables()]}")
    return _PLACE.sub(lambda found: f"{found[1]}{_table(found[2])}\n{found[3]}", page)


def _table(title: str) -> str:
    rows = []
    for name, default_value, text in tables()[title]:
        value = f"`{default_value}`" if default_value else "not set"
        full_stop = "." if ". " in text else ""
        rows.append(f"| `{name}` | {value} | {text}{full_stop} |")
    return "\n".join(["", "| setting | default | meaning |", "|---|---|---|", *rows, ""])


if __name__ == "__main__":
    EXAMPLE.write_text(env_example(), "utf-8")
    PAGE.write_text(with_tables(PAGE.read_text("utf-8")), "utf-8")
