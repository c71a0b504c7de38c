"""The public name of a model."""

import os
import re
from functools import cache
from pathlib import Path

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)


@cache
def public_name(model: str) -> str:
    """The hub id, or the last part of a local folder's path.

    `model` is a setting's value. The path of a folder never leaves the machine.
    """
    # Unlike pathlib's, this one does not raise where there is no home folder.
    folder = Path(os.path.expanduser(model))  # noqa: PTH111
    if _HUB_ID.fullmatch(model) and not folder.is_dir():
        return model
    # Absolute, because . and .. are no names; links are not followed, to keep the name of the link.
    return re.split(r"[/\\]", os.path.abspath(folder))[-1] or "model"  # noqa: PTH100
