"""Where the OpenVINO models of a checkpoint lie, and making those that are missing."""

import subprocess
import sys
from pathlib import Path


def model_file(folder: Path, kind: str) -> Path:
    """The model of that kind, `float` or `int8`, whether it exists or not."""
    return folder.parent / f"{folder.name}-openvino" / kind / "model.xml"


def existing_model(folder: Path, kind: str) -> Path:
    """The model, made now if there is none or the checkpoint is newer.

    Another process makes it, so that its memory does not count as that of the engine.
    """
    file = model_file(folder, kind)
    if not file.exists() or file.stat().st_mtime < (folder / "config.json").stat().st_mtime:
        maker = "benchmarks.adapters.openvino_models"
        subprocess.run([sys.executable, "-m", maker, str(folder), kind], check=True)
    return file
