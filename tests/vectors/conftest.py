"""What the libraries that are followed here make of some vectors."""

import json

import pytest

from tests.vectors import record_references
from tests.vectors.references import ENVIRONMENT, MISSING, run_references

REFERENCES = json.loads(record_references.REFERENCES.read_text("utf-8"))


@pytest.fixture(scope="session")
def references():
    """The packages themselves."""
    if not ENVIRONMENT.is_dir():
        pytest.skip(MISSING)
    with run_references() as running:
        yield running
