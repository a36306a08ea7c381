"""``sbnet-cupy demo``: block-sparse against dense, on a picture or a point cloud of your own.

=============  =====================================================================
``inputs``     files in, with one clear error for each way a file can be wrong
``compare``    the same computation densely and block-sparsely; error and times
``picture``    a source detector: differences of Gaussians
``points``     a residual unit over a LiDAR scan seen from above
``report``     the table and the picture file
=============  =====================================================================
"""

from pathlib import Path

from .inputs import DemoError, check_extras, output_folder

__all__ = ["DemoError", "run"]


def run(options):
    """Run the demo that the command line's options ask for; return the exit code."""
    check_extras()
    folder = output_folder(options.out)
    xp, device = choose_device(options.device)
    from . import picture, points, report

    path = options.input
    if path is not None and path.lower().endswith(".bin"):
        size = _block_size(options.block_size, points.BLOCK_SIZE, 3)
        grid = {"x_range": options.x_range, "y_range": options.y_range, "cell": options.cell}
        found = points.run(path, options.mask, size, xp, grid)
    else:
        size = _block_size(options.block_size, picture.BLOCK_SIZE, picture.KERNEL)
        found = picture.run(path, options.mask, size, xp)
    report.print_table(found, device)
    target = folder / f"sbnet_demo_{'hubble' if path is None else Path(path).stem}.png"
    report.save_picture(found, target)
    print(f"Wrote {target}")
    return 0 if found.result.agrees else 1


def choose_device(wanted):
    """Return the array library to compute with, and what to call it."""
    import numpy

    if wanted != "cpu":
        try:
            import cupy
        except ImportError as error:
            reason = f"CuPy cannot be imported ({error})"
        else:
            if cupy.cuda.is_available():
                name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"]
                return cupy, f"{name.decode()} (CuPy {cupy.__version__})"
            reason = "CuPy finds no CUDA device"
        if wanted == "gpu":
            raise DemoError(f"--device gpu: {reason}; see: sbnet-cupy info")
    return numpy, f"CPU (NumPy {numpy.__version__})"


def _block_size(given, default, minimum):
    if given is not None and given < minimum:
        raise DemoError(f"--block-size must be at least the kernel, {minimum}, got {given}")
    return default if given is None else given
