"""Which options of the demo go with which input. One that has no effect is refused by name."""

from .inputs import DemoError
from .scan_file import is_raw, is_scan

GRID = {"x_range": (0.0, 70.4), "y_range": (-40.0, 40.0), "cell": 0.1}  # metres


def check_options(options):
    """Raise DemoError if an option that was given does not apply to the input."""
    path = options.input
    if path is None or not is_scan(path):
        what = "the Hubble deep field" if path is None else path
        for name in (*GRID, "columns"):
            if getattr(options, name) is not None:
                raise DemoError(f"{_flag(name)} applies to a scan, and {what} is read as a picture")
    elif options.columns is not None:
        if not is_raw(path):
            raise DemoError(f"--columns applies to .bin files; {path} says what columns it has")
        if options.columns < 3:
            raise DemoError(f"--columns must be at least 3, for x, y and z, got {options.columns}")


def grid_of(options):
    """Return x_range, y_range and cell of the grid, as given or by default."""
    given = {name: getattr(options, name) for name in GRID}
    return {name: GRID[name] if value is None else value for name, value in given.items()}


def _flag(name):
    return "--" + name.replace("_", "-")
