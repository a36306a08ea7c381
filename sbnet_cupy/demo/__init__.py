"""``sbnet-cupy demo``: block-sparse against dense, on a picture or a point cloud of your own.

================  ==================================================================
``options``       which options go with which input
``inputs``        what the demo needs and accepts; ``DemoError``
``output``        where the picture goes
``picture_file``  picture files of any size, in bounded memory
``scan_file``     LiDAR scans: .bin, .npy, .npz, .pcd
``scan_columns``  whether raw values are points of so many columns
``pcd_file``      the format of the Point Cloud Library; ``lzf`` is its compression
``reduction``     means and maxima of squares of pixels
``compare``       the same computation densely and block-sparsely; error and times
``torch_dense``   the dense computation by PyTorch, to be timed as well
``picture``       a source detector: differences of Gaussians
``points``        a residual unit over a LiDAR scan seen from above
``interrupts``    holds Ctrl-C back where it must not interrupt
``progress``      a progress bar for what takes long
``report``        what a demo found
``table``         ... as a table on the terminal
``figure``        ... as a picture file
================  ==================================================================
"""

from pathlib import Path

from .inputs import DemoError, check_extras, check_file
from .options import check_options, grid_of
from .output import png_target

__all__ = ["DemoError", "run"]


def run(options):
    """Run the demo that the command line's options ask for; return the exit code."""
    check_extras()
    check_options(options)
    path = options.input
    if path is not None:
        check_file(path)
    target = png_target(options.out, "hubble" if path is None else Path(path).stem)
    xp, device = choose_device(options.device)
    from . import figure, table
    from .progress import Progress

    with Progress() as progress:
        found = _compute(options, xp, progress)
        progress.step("drawing the picture")
        try:
            figure.save_picture(found, target)
            problem = None
        except DemoError as error:  # a full disk, say: the table is worth printing all the same
            problem = error
    table.print_table(found, device)
    if problem:
        raise problem
    print(f"Wrote {target}")
    return 0 if found.result.agrees else 1


def _compute(options, xp, progress):
    """Run the demo for the kind of input; return its Report."""
    from . import picture, points
    from .scan_file import is_scan

    path, size = options.input, options.block_size
    if path is not None and is_scan(path):
        size = _block_size(size, points.BLOCK_SIZE, 3)
        grid = grid_of(options)
        return points.run(path, options.columns, options.mask, size, xp, grid, progress)
    size = _block_size(size, picture.BLOCK_SIZE, picture.KERNEL)
    return picture.run(path, options.mask, size, xp, progress)


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
