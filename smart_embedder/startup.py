"""Load the models of the settings at startup.

torch is imported when `load_models` is called, not with this module: that takes seconds, and the
port must answer before.
"""

import ctypes
import os
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

from smart_embedder.interface import DefaultModels, DownloadStatus
from smart_embedder.models.files.reading import model_folders, read_ahead
from smart_embedder.settings import EngineSettings

# How often a thread of PyTorch's pool polls for work before it sleeps. This takes about 80
# microseconds, longer than the time between two operators. With the default of GNU OpenMP, 300,000,
# threads poll for milliseconds, and may take the core of the thread that they wait for.
_SPINS = "2000"
# Seconds until a thread that waits for the GIL may request it. A forward waits for the GIL in each
# of its hundreds of operators. With Python's default of 5 ms, the event loop would release the GIL
# and take it again before a request.
_SWITCH_INTERVAL = 1e-4


def link_ahead() -> None:
    """Link PyTorch's library on a thread while Python imports other modules.

    This takes a fifth of a second. The library for GPUs is left to PyTorch, which links several in
    its own order.
    """
    found = find_spec("torch")
    folder = Path(found.origin or "").parent / "lib" if found else Path()
    library = folder / "libtorch_cpu.so"
    if sys.platform != "linux" or not library.is_file() or (folder / "libtorch_cuda.so").exists():
        return
    limit_spins()
    # PyDLL, or an import, would hold the GIL in the meantime. The import reports errors.
    link = ctypes.CDLL(None).dlopen
    link.argtypes, link.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    threading.Thread(target=link, args=(os.fsencode(library), os.RTLD_NOW), name="link").start()


def load_models(settings: EngineSettings, status: DownloadStatus | None = None) -> DefaultModels:
    """Load the default models.

    `status` is updated during a download. Raises `StartupError` if a model cannot be loaded.
    """
    _prepare_libraries()
    sys.setswitchinterval(min(_SWITCH_INTERVAL, sys.getswitchinterval()))
    # Read the weights from the disk, and parse the tokenizers, while Python imports PyTorch.
    folders = list(model_folders(settings))
    read_ahead(folders)
    from smart_embedder.models.tokenizer_files import parse_ahead  # noqa: PLC0415 - see above

    with parse_ahead(folder / "tokenizer.json" for folder in folders):
        from smart_embedder.models.loader import EntryLoader  # noqa: PLC0415 - see above

        return EntryLoader(settings, status).load_defaults()


def _prepare_libraries() -> None:
    """Set the environment variables that PyTorch and huggingface_hub read."""
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    # PYTORCH_ALLOC_CONF is the newer name of the variable.
    if not any(map(os.environ.get, ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    limit_spins()


def limit_spins() -> None:
    """Set the spin count, which GNU OpenMP reads when it is linked with PyTorch's library."""
    if "OMP_WAIT_POLICY" not in os.environ:  # The standard variable for the same purpose.
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
