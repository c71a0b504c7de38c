"""A Ray cluster for the tests that scripts/check_cluster.sh runs."""

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.deploy.ray.ray_cluster import run_cluster


@pytest.fixture(scope="session")
def cluster():
    # A short path: Ray creates sockets below it.
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    with run_cluster(folder) as running:
        yield running
    shutil.rmtree(folder, ignore_errors=True)
