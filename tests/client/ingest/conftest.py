"""Run ingest in this process, with each kind of collection."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from smart_embedder_client.ingest.options import IngestOptions, Report
from smart_embedder_client.ingest.run import ingest
from smart_embedder_client.qdrant import open_store
from smart_embedder_client.qdrant.store import Store, Target, iterate_pages

from tests.support.qdrant.process import QdrantServer, run_qdrant
from tests.support.server import REPOSITORY, RunningServer
from tests.support.waiting import LIMIT


@dataclass(frozen=True)
class Runs:
    """Runs of one source into one collection, with the same journal."""

    url: str
    target: Target
    journal: Path
    options: IngestOptions

    def run(self, **changes: Any) -> Report:
        options = replace(self.options, **changes)
        return asyncio.run(ingest(options, self.target, self.url, journal=self.journal))

    def query_store(self, ask: Callable[[Store], Any]) -> Any:
        """Query the collection between two runs."""
        with closing(open_store(self.target)) as store:
            return ask(store)

    def ids(self) -> list[str]:
        found = self.query_store(lambda store: list(iterate_pages(store, self.options.dataset)))
        return [id_ for page in found for id_ in page]

    def arguments(self, *more: str) -> list[str]:
        """Return the same run as command line arguments."""
        where = ["--qdrant", self.target.address, "--collection", self.target.collection]
        options = ["--dataset", self.options.dataset, "--chunk-tokens", "48", "--overlap", "8"]
        options += ["--journal", str(self.journal), "--no-grpc"]
        return [str(self.options.source), "--url", self.url, *where, *options, *more]

    @contextmanager
    def started(self, *more: str) -> Iterator["subprocess.Popen[str]"]:
        """Run the command in a process, which is killed at the end of the block."""
        process = subprocess.Popen(
            [sys.executable, "-m", "smart_embedder_client", "ingest", *self.arguments(*more)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY / "client" / "src")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate(timeout=LIMIT)


def is_stored_once(runs: Runs, qdrant: QdrantServer, points: int) -> bool:
    """Whether the collection has this many points, each stored once."""
    ids = runs.ids()
    uploads = qdrant.state(runs.target.collection)["uploads"]
    return len(ids) == len(set(ids)) == points and {uploads[id_] for id_ in ids} == {1}


@pytest.fixture(scope="session")
def qdrant() -> Iterator[QdrantServer]:
    """A server in front of Qdrant's engine in Python, for all tests of a process."""
    with run_qdrant() as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The source: three texts, one with several chunks."""
    texts = tmp_path / "texts"
    texts.mkdir()
    paragraphs = [f"Paragraph {i}: search a vector in the river of bread." for i in range(12)]
    (texts / "long.md").write_text("# Long\n\n" + "\n\n".join(paragraphs))
    (texts / "pump.txt").write_text("The pump is blocked in winter.")
    (texts / "lid.txt").write_text("The lid of the train is open.")
    return texts


def make_runs(server: RunningServer, target: Target, source: Path, folder: Path) -> Runs:
    options = IngestOptions(
        source=source, dataset="texts", chunk_tokens=48, overlap=8, patience=60.0
    )
    return Runs(server.url, target, folder / "journal.sqlite", options)


def make_target(kind: str, tmp_path: Path, qdrant: QdrantServer) -> Target:
    """Return the target of a collection that does not exist yet."""
    name = tmp_path.name
    if kind == "grpc":
        return Target(qdrant.url, name, grpc_port=qdrant.grpc_port)
    addresses = {
        "http": qdrant.url,
        "edge": f"edge:{tmp_path / 'edge'}",
    }
    return Target(addresses[kind], name, use_grpc=False)


@pytest.fixture(params=["http", "grpc", "edge"])
def runs(request, server, qdrant: QdrantServer, folder: Path, tmp_path: Path) -> Iterator[Runs]:
    """Runs into each kind of collection."""
    yield make_runs(server, make_target(request.param, tmp_path, qdrant), folder, tmp_path)
    qdrant.fail()


@pytest.fixture
def http_runs(server, qdrant: QdrantServer, folder: Path, tmp_path: Path) -> Iterator[Runs]:
    """Runs into a server whose uploads can be made to fail."""
    yield make_runs(server, make_target("http", tmp_path, qdrant), folder, tmp_path)
    qdrant.fail()


@pytest.fixture
def edge_runs(server, qdrant: QdrantServer, folder: Path, tmp_path: Path) -> Runs:
    """Runs into Qdrant Edge, for tests that need only one kind of collection."""
    return make_runs(server, make_target("edge", tmp_path, qdrant), folder, tmp_path)
