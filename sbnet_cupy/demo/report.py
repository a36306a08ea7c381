"""What a demo found: the table and the picture show it."""

from dataclasses import dataclass, field

import numpy as np

from .compare import Comparison


@dataclass(frozen=True)
class Report:
    """The comparison, and what to show of it."""

    name: str
    task: str
    picture: np.ndarray  # [H, W] or [H, W, 3]
    picture_label: str
    mask: object  # [H, W] bool
    mask_label: str
    response: object  # [H, W], of the block-sparse run
    response_label: str
    result: Comparison
    rows: list  # further rows of the table: (what, dense, block-sparse)
    points: object = field(default_factory=lambda: np.zeros((0, 2)))  # (row, column) to circle
    extent: tuple | None = None  # (y0, y1, x0, x1) in metres, for a grid seen from above
    reduced_from: tuple | None = None  # (height, width, factor) of a picture that was reduced

    def sizes(self):
        """Return the size that was computed, and how it came from the picture's."""
        h, w = self.mask.shape
        if self.reduced_from is None:
            return f"{h} x {w}"
        rows, columns, factor = self.reduced_from
        return f"{rows} x {columns}, computed at {h} x {w}: means of {factor} x {factor} pixels"


def verdict(result):
    """Say in one line whether the two runs agree."""
    if result.agrees:
        return f"Equal up to rounding, which explains {result.tolerance:.2g}."
    return f"DIFFERENT: rounding explains no more than {result.tolerance:.2g}."
