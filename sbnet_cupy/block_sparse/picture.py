"""What an ActiveBlocks prints: how many blocks are active, and a picture of the grid."""

import math

from ..core.arrays import array_function, is_cupy, library_of
from ..core.readable import can_be_read, shape_of

_ROWS, _COLUMNS, _IMAGES = 16, 64, 3  # of the picture, at most


def describe(active):
    """Return the text that ``repr`` prints of an ActiveBlocks; it never raises."""
    arrays = (active.bin_counts, active.active_block_indices)
    if all(map(can_be_read, arrays)) and _belong_together(*arrays):
        return _describe(active)
    shapes = list(map(shape_of, arrays))
    return (
        f"ActiveBlocks: not read, grid {active.grid}, bin_counts {shapes[0]}, "
        f"active_block_indices {shapes[1]}"
    )


def _belong_together(counts, indices):
    """Whether these are a count and rows, in one library and on one device."""
    library = library_of(counts)
    if library is None or library is not library_of(indices):
        return False
    shapes = tuple(counts.shape), tuple(indices.shape)
    same = library.place(counts) == library.place(indices)
    return same and shapes[0] == (1,) and len(shapes[1]) == 2 and shapes[1][1] == 3


@array_function
def _describe(active):
    """Describe native arrays."""
    count, indices = active.bin_counts, active.active_block_indices
    if is_cupy(indices):
        count, indices = count.get(), indices.get()
    images, rows, columns = active.grid
    count, capacity = int(count[0]), len(indices)
    total = math.prod(active.grid)
    share = f" ({100 * count / total:.3g}%)" if total else ""
    head = f"ActiveBlocks: {count} of {total} blocks active{share}, grid {active.grid}"
    lines = [f"{head}, capacity {capacity}" + (", which is too few" * (count > capacity))]
    listed = indices[: min(max(count, 0), capacity)]
    for image in range(min(images, _IMAGES) if rows and columns else 0):
        if images > 1:
            lines.append(f"image {image}:")
        lines += _picture(listed[listed[:, 0] == image, 1:], rows, columns)
    if images > _IMAGES and rows and columns:
        lines.append(f"and {images - _IMAGES} more images")
    return "\n".join(lines)


def _picture(places, rows, columns):
    """Draw a grid whose active blocks are at ``places [m, 2]``, some blocks to a character.

    "#": all of them are active, "+": some are, ".": none is.
    """
    high, wide = -(-rows // _ROWS), -(-columns // _COLUMNS)
    found = {}
    for i, j in set(map(tuple, places.tolist())):
        if 0 <= i < rows and 0 <= j < columns:
            cell = (i // high, j // wide)
            found[cell] = found.get(cell, 0) + 1

    def character(i, j):
        number = found.get((i, j), 0)
        size = (min((i + 1) * high, rows) - i * high) * (min((j + 1) * wide, columns) - j * wide)
        return "." if not number else "#" if number == size else "+"

    across = range(-(-columns // wide))
    return ["".join(character(i, j) for j in across) for i in range(-(-rows // high))]
