"""The libraries that are followed here, where they are installed."""

import pytest

from tests.vectors.references import ENVIRONMENT, MISSING, run_references


@pytest.fixture(scope="session")
def references():
    """The packages themselves."""
    if not ENVIRONMENT.is_dir():
        pytest.skip(MISSING)
    with run_references() as running:
        yield running
