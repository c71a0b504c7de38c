"""The parsers that are fuzzed; the module of a target is imported only when it is loaded."""

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
