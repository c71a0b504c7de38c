"""What every test process does before it imports anything large."""

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from tests.support.copied_process import offer_copies
from tests.support.fast import left_out

# Before anything imports huggingface_hub: no test may reach for a model hub.
os.environ["HF_HUB_OFFLINE"] = "1"
# No client here asks a server for its certificate, and to read those it would trust takes 30 ms.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.devnull
# Before anything imports torch, as in the service: several processes share the cores, and a thread
# that waits for another one would hold its core for milliseconds.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
# A shell starts what is to run in the background with interrupts ignored, and the programs that
# tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where no log is set up, a trace would be painted with its source, which takes half a second.
plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
structlog.configure(processors=[*structlog.get_config()["processors"][:-1], plain])

# How long an example takes says nothing on a shared machine.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")
settings.register_profile("fast", deadline=None, max_examples=10)

# Folders whose files share servers, so that one process runs them all.
_TOGETHER = ("tests/app/ui/", "tests/client/ingest/", "tests/clients/")


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "only tests that start no process, reference or browser (tests/support/fast.py)"
    parser.addoption("--fast", action="store_true", help=told)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Decide before a file or its conftest.py is imported: their imports may take seconds."""
    has_tests = collection_path.match("test_*.py") or collection_path.is_dir()
    return True if config.getoption("fast") and has_tests and left_out(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take long, for which all would wait in the end; or leave it out."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if config.getoption("fast"):
        items[:] = [item for item in items if item.get_closest_marker("long") is None]


class LoadSharedServers(LoadFileScheduling):
    """Hands out whole files, and some folders as a whole."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return next((folder for folder in _TOGETHER if file.startswith(folder)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadSharedServers:
    """Replace the scheduler of `--dist`."""
    return LoadSharedServers(config, log)


def pytest_collection_finish() -> None:
    """Let no collection of garbage look again at what was imported: a million objects."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Share a template of servers, and load the fixtures where they are used: that takes 5 s.

    That is neither where xdist only hands out the tests, nor with `--fast`, as nearly all of them
    make checkpoints with transformers.
    """
    is_worker = hasattr(config, "workerinput")
    if not is_worker:
        offer_copies()
    hands_out = config.getoption("numprocesses", None) and not is_worker
    if not hands_out:
        gc.disable()  # What is imported stays: until then there is nothing to collect.
    if config.getoption("fast"):
        settings.load_profile("fast")
    elif not hands_out:
        config.pluginmanager.import_plugin("tests.support.fixtures")
