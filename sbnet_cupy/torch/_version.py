"""Is there a PyTorch, and is it new enough?"""

OLDEST = (2, 6)


def check_version():
    """Raise ImportError, saying what to install, unless PyTorch is there and new enough."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "sbnet_cupy.torch needs PyTorch, which is not installed; "
            'pip install "sbnet-cupy[torch]"'
        ) from error
    found = torch.__version__
    if tuple(int(part) for part in found.split("+")[0].split(".")[:2]) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise ImportError(
            f"sbnet_cupy.torch needs PyTorch {wanted} or newer, got {found}; "
            'pip install --upgrade "sbnet-cupy[torch]"'
        )
