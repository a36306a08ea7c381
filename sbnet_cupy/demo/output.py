"""Where the demo writes its picture. Whether it can is found out before anything is computed."""

import os
from pathlib import Path

from .inputs import DemoError


def png_target(folder, name):
    """Return the path ``folder/sbnet_demo_NAME.png``, or raise DemoError if it cannot be written.

    The folder is created. A file that is there already keeps its contents until it is replaced.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"--out: cannot create {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise DemoError(f"--out: cannot write to {folder}; name a folder of your own")
    target = folder / f"sbnet_demo_{name}.png"
    existed = target.exists()
    try:
        with target.open("ab"):
            pass
        if not existed:
            target.unlink()
    except OSError as error:
        raise cannot_write(target, error) from error
    return target


def cannot_write(target, error):
    """Return the DemoError for a picture that the system refuses to write."""
    return DemoError(f"--out: cannot write {target}: {error.strerror or error}")
