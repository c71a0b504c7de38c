"""What every test process does before it imports anything large."""

import os
import signal

import pytest
from hypothesis import settings

# Before anything imports huggingface_hub: no test may reach for a model hub.
os.environ["HF_HUB_OFFLINE"] = "1"
# Before anything imports torch, as in the service: several processes share the cores, and a thread
# that waits for another one would hold its core for milliseconds.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
# A shell starts what is to run in the background with interrupts ignored, and the programs that
# tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says nothing on a shared machine.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures, but not where xdist only hands out the tests: their imports take 5 s."""
    hands_out = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not hands_out:
        config.pluginmanager.import_plugin("tests.support.fixtures")
