"""The parsers that are fuzzed, each by itself: a target imports nothing that it does not need."""

import importlib

from tests.fuzzing.inputs import Target

MODULES = {
    "heads": "request_heads",
    "bodies": "json_bodies",
    "checkpoints": "safetensors_files",
    "answers": "safetensors_files",
}


def load(name: str) -> Target:
    return importlib.import_module(f"tests.fuzzing.{MODULES[name]}").TARGETS[name]
