"""The loader that the service is wired with: from settings to warm models.

torch is imported when it is called and not with this module: that takes seconds, and the port must
answer before it is done.
"""

import os
import sys
from dataclasses import replace

from app.engine.download import DownloadStatus
from app.engine.loaded_models import LoadedModels
from app.models.checkpoint.read_ahead import Half, read_ahead
from app.settings import Settings

# How often a thread of PyTorch's pool looks whether the others are done before it sleeps, in all
# some 80 microseconds: longer than what lies between two operators. GNU OpenMP's own 300,000 are
# milliseconds in which the thread that the others wait for may have no core.
_SPINS = "2000"
# How long a thread that computes waits for the interpreter before it is given it, in seconds. It
# waits anew for each of a forward's hundreds of operators, and for ever where the event loop gives
# the interpreter up and takes it again within that time. Python's own 5 ms are longer than what the
# loop does between two looks at its sockets.
_SWITCH_INTERVAL = 1e-4


def load_models(settings: Settings, status: DownloadStatus | None = None) -> LoadedModels:
    """Load and warm what the settings name; called in the device thread.

    `status` shows a download while it is under way.
    Raises `StartupError` for whatever stands in the way.
    """
    _prepare_libraries(settings)
    sys.setswitchinterval(min(_SWITCH_INTERVAL, sys.getswitchinterval()))
    # The weights come from the disk while Python imports.
    read_ahead(settings, Half.SECOND)
    from app.models.model_loader import EntryLoader  # noqa: PLC0415 - see above
    from app.models.runtime import load  # noqa: PLC0415

    models = load(settings, status)
    if settings.models:
        models = replace(models, loader=EntryLoader(settings, status))
    read_ahead(settings, Half.FIRST)
    return models


def _prepare_libraries(settings: Settings) -> None:
    """Set the variables that PyTorch and the hub's library read when they are imported."""
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    if "PYTORCH_ALLOC_CONF" not in os.environ:  # PyTorch's newer name, which only it knows.
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings.pytorch_cuda_alloc_conf
    if "OMP_WAIT_POLICY" not in os.environ:  # Says the same in another way.
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
