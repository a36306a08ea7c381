"""What the demo needs and accepts; everything that the user can put right is a DemoError."""

import importlib.util
from pathlib import Path

_MODULES = {"skimage": "scikit-image", "matplotlib": "matplotlib", "rich": "rich"}


class DemoError(Exception):
    """Something the user can put right; the command line prints it as one line."""


def check_extras():
    """Raise DemoError unless everything of the extra ``demo`` is installed."""
    missing = [dist for name, dist in _MODULES.items() if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(
            f'the demo needs {", ".join(missing)}; install with: pip install "sbnet-cupy[demo]"'
        )


def check_file(path):
    """Raise DemoError unless ``path`` is a file."""
    if not Path(path).is_file():
        reason = "is not a file" if Path(path).exists() else "does not exist"
        raise DemoError(f"{path} {reason}")


def check_size(name, shape, minimum):
    """Raise DemoError when an image is smaller than one block."""
    if min(shape[:2]) < minimum:
        raise DemoError(
            f"{name} must be at least {minimum} x {minimum} pixels, the size of one block, "
            f"got {size_text(shape)}; give a larger one or a smaller --block-size"
        )


def size_text(shape):
    """Return a size as ``height x width``."""
    return f"{shape[0]} x {shape[1]}"
