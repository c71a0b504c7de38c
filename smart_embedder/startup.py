"""The service's loader: from settings to warm models.

torch is imported when the loader is called and not with this module, because that takes seconds,
and the port must answer before.
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

# How often a thread of PyTorch's pool polls for work before it sleeps: about 80 microseconds,
# longer than the time between two operators. GNU OpenMP's default, 300,000, means milliseconds in
# which the thread that the others wait for may have no core.
_SPINS = "2000"
# Seconds until a thread that waits for the GIL may request it. A forward waits anew for each of its
# hundreds of operators, and in vain as long as the event loop releases the GIL and takes it again
# within that time, as it does within Python's default of 5 ms.
_SWITCH_INTERVAL = 1e-4


def link_ahead() -> None:
    """Have PyTorch's library linked on a thread that needs nothing of Python's, beside imports.

    It takes a fifth of a second. That of a GPU is left to PyTorch, which links it in its own order.
    """
    found = find_spec("torch")
    folder = Path(found.origin or "").parent / "lib" if found else Path()
    library = folder / "libtorch_cpu.so"
    if sys.platform != "linux" or not library.is_file() or (folder / "libtorch_cuda.so").exists():
        return
    limit_spins()
    # PyDLL, and an import, would hold Python's lock meanwhile. An error is the import's affair.
    link = ctypes.CDLL(None).dlopen
    link.argtypes, link.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    threading.Thread(target=link, args=(os.fsencode(library), os.RTLD_NOW), name="link").start()


def load_models(settings: EngineSettings, status: DownloadStatus | None = None) -> DefaultModels:
    """Load the models that have settings of their own.

    `status` shows a running download. Raises `StartupError` if a model cannot be loaded.
    """
    _prepare_libraries()
    sys.setswitchinterval(min(_SWITCH_INTERVAL, sys.getswitchinterval()))
    # The weights come from the disk, and tokenizers are parsed, while Python imports PyTorch.
    folders = list(model_folders(settings))
    read_ahead(folders)
    from smart_embedder.models.tokenizer import parse_ahead  # noqa: PLC0415 - see above

    with parse_ahead(folder / "tokenizer.json" for folder in folders):
        from smart_embedder.models.loader import EntryLoader  # noqa: PLC0415 - see above

        return EntryLoader(settings, status).load_defaults()


def _prepare_libraries() -> None:
    """Set the variables that PyTorch and the hub's library read."""
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    # The second is PyTorch's newer name of the variable.
    if not any(map(os.environ.get, ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    limit_spins()


def limit_spins() -> None:
    """Set what GNU OpenMP reads when it is linked, with PyTorch's library."""
    if "OMP_WAIT_POLICY" not in os.environ:  # A standard variable for the same purpose.
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
