"""What a model is called where others can read it."""

import os
import re
from functools import cache
from pathlib import Path

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)


@cache
def public_name(model: str) -> str:
    """The hub id, or the last part of a local folder's path.

    `model` is a setting's value. Where the folder lies is nobody's business but the machine's.
    """
    # Unlike pathlib's, this one does not raise where there is no home folder.
    folder = Path(os.path.expanduser(model))  # noqa: PTH111
    if _HUB_ID.fullmatch(model) and not folder.is_dir():
        return model
    # Whole, as . and .. name nothing; links are not followed, since the link's name was chosen.
    return re.split(r"[/\\]", os.path.abspath(folder))[-1] or "model"  # noqa: PTH100
