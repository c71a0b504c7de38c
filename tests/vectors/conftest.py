"""What the libraries that are followed here make of some vectors."""

import json

from tests.vectors import record_references

REFERENCES = json.loads(record_references.REFERENCES.read_text("utf-8"))
