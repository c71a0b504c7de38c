"""Skips what needs Ray where its environment, made by scripts/check_cluster.sh, is not there.

Where it is, a part that takes a minute runs with the other tests, and all by that script.
"""

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.deploy.ray.ray_cluster import BIN, run_cluster


@pytest.fixture(scope="session")
def cluster():
    if not BIN.is_dir():
        pytest.skip("scripts/check_cluster.sh runs these")
    # A short path: Ray creates sockets below it.
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    with run_cluster(folder) as running:
        yield running
    shutil.rmtree(folder, ignore_errors=True)
