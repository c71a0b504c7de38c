"""Run the files of examples/ as users do: in a process, with a service and a database.

scripts/check_examples.sh makes an environment for each by its header, and runs these tests.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import REPOSITORY, RunningServer, run_server

ENVIRONMENTS = REPOSITORY / ".venv-examples"
EXAMPLES = sorted((REPOSITORY / "examples").glob("*_hybrid.py"))
RIGHT = "Error E42: the pump is blocked. Clean the filter and start again."
PASSAGES = 4
TOKEN = "my-token"
SECONDS = 180

pytestmark = [
    pytest.mark.skipif(
        not ENVIRONMENTS.is_dir(), reason="scripts/check_examples.sh makes their environments"
    ),
    pytest.mark.timeout(3 * SECONDS),
]


@pytest.fixture(scope="module")
def service(demo_checkpoint: Path, tmp_path_factory) -> Iterator[RunningServer]:
    settings = {"EMBEDDING_MODEL": str(demo_checkpoint), "API_TOKEN": TOKEN}
    with run_server(tmp_path_factory.mktemp("service"), **settings) as running:
        yield running


@pytest.fixture
def folder() -> Iterator[Path]:
    """The folder for the data of an example, readable for the user of PostgreSQL."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def run(example: Path, folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [ENVIRONMENTS / example.stem / "bin/python", example],
        cwd=folder,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "PYTHONPATH": str(REPOSITORY / "client" / "src"),
            **variables,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_ranks_the_right_passage_first_and_reports_a_wrong_token(
    example: Path, service: RunningServer, folder: Path
) -> None:
    variables = {"SMART_EMBEDDER_URL": service.url, "SMART_EMBEDDER_TOKEN": TOKEN}
    first = run(example, folder, **variables)
    stored = list(folder.iterdir())
    second = run(example, folder, **variables)
    for done in (first, second):
        assert done.returncode == 0, done.stderr
        ranked = re.findall(r"(?m)^-?\d+\.\d{3}  (.+)$", done.stdout)
        assert len(set(ranked)) == len(ranked) == PASSAGES
        assert ranked[0] == RIGHT
    assert second.stdout == first.stdout
    assert stored, "the second run was to find what the first one stored"
    done = run(example, folder, SMART_EMBEDDER_URL=service.url, SMART_EMBEDDER_TOKEN="another")
    assert done.returncode == 1
    assert "401" in done.stderr.splitlines()[-1]


def test_qdrant_example_in_memory(service: RunningServer, folder: Path) -> None:
    variables = {"SMART_EMBEDDER_URL": service.url, "SMART_EMBEDDER_TOKEN": TOKEN}
    example = REPOSITORY / "examples/qdrant_hybrid.py"
    done = run(example, folder, QDRANT_URL=":memory:", **variables)
    assert done.returncode == 0, done.stderr
    assert RIGHT in done.stdout.splitlines()[0]
    assert not list(folder.iterdir())
