"""Where the blocks of a stack lie, in JAX: pixels of neighbouring blocks, in XLA's own operations.

The counterpart of the core's ``block_sparse/stack/neighbours.py``. A row of a stack is read at most
once by each strip, so that the gradient, which writes it back, adds in a fixed order.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ..block_sparse.stack.block_table import BlockTable, split_table
from ..block_sparse.stack.neighbours import Axis
from ._specs import spec_of


def _flatten(table):
    return table._arrays(), (table.block_size, table.image_size)


def _unflatten(sizes, arrays):
    """Make a table of what JAX puts in the place of arrays, unchecked."""
    table = object.__new__(BlockTable)
    names = ("bin_counts", "active_block_indices", "grid", "block_size", "image_size")
    for name, value in zip(names, (*arrays, *sizes), strict=True):
        object.__setattr__(table, name, value)
    return table


jax.tree_util.register_pytree_node(BlockTable, _flatten, _unflatten)


def specs_of_table(table):
    """Return the specs of the arrays of a table, and its sizes; raise for what is none of JAX."""
    arrays, sizes = split_table(table)
    names = ("table.bin_counts", "table.active_block_indices", "table.grid")
    return tuple(map(spec_of, names, arrays)), sizes


def table_of(arrays, stage):
    """Return the table of these arrays at a stage, unchecked."""
    return _unflatten(stage, arrays)


class Places:
    """The places of the rows of a stack."""

    def __init__(self, table):
        self.table, self.rows = table, table.active_block_indices.shape[0]
        self.limit = jnp.minimum(table.bin_counts[0], self.rows)
        valid = jnp.arange(self.rows) < self.limit
        indices = table.active_block_indices.T
        for index, size in zip(indices, table.grid.shape, strict=True):
            valid &= (index >= 0) & (index < size)
        self.valid = valid
        self.n, self.hi, self.wi = jnp.where(valid, indices, 0)

    def neighbour(self, down, right):
        """Return the row of the block so many places away; the number of rows if there is none."""
        grid, hi, wi = self.table.grid, self.hi + down, self.wi + right
        if not grid.size:
            return jnp.full(hi.shape, self.rows, grid.dtype)
        found = self.valid & (hi >= 0) & (hi < grid.shape[1]) & (wi >= 0) & (wi < grid.shape[2])
        row = grid[self.n, jnp.where(found, hi, 0), jnp.where(found, wi, 0)]
        return jnp.where(found & (row >= 0) & (row < self.limit), row, self.rows)

    def pixels(self, axis, lattice):
        """Return int32 [M, count]: the pixels of the image that an Axis names."""
        start = (self.hi, self.wi)[axis] * self.table.block_size[axis] + lattice.first
        return start[:, None] + lattice.step * jnp.arange(lattice.count, dtype=jnp.int32)

    def inside(self, down, across):
        """Return bool [M, P, Q, 1]: which pixels of the lattice lie in the image."""
        here = []
        for axis, lattice in enumerate((down, across)):
            pixel = self.pixels(axis, lattice)
            here.append((pixel >= 0) & (pixel < self.table.image_size[axis]))
        return (here[0][:, :, None] & here[1][:, None, :] & self.valid[:, None, None])[..., None]

    def own(self):
        """Return bool [M, b_h, b_w, 1]: which pixels of the rows are in the image."""
        return self.inside(*(Axis(0, 1, b) for b in self.table.block_size))

    def only_listed(self, stack):
        """Return a stack with zeros in the rows that are no block."""
        return jnp.where(self.valid[:, None, None, None], stack, 0)

    def fetch(self, x, down, across, fill=0):
        """Return the pixels that two Axis name, around each block, as the core's ``fetch``."""
        lines = []
        for dh, _, from_h in down.pieces(self.table.block_size[0]):
            strips = []
            for dw, _, from_w in across.pieces(self.table.block_size[1]):
                strip, row = x[:, from_h, from_w], self.neighbour(dh, dw)
                strips.append(_taken(strip, row, 0))
            lines.append(jnp.concatenate(strips, axis=2))
        halo = jnp.concatenate(lines, axis=1)
        outside = jnp.asarray(-np.inf if fill == "-inf" else 0, halo.dtype)
        halo = jnp.where(self.inside(down, across), halo, outside)
        if fill == "edge":
            halo = self._nearest(self._nearest(halo, 0, down), 1, across)
        return self.only_listed(halo)

    def _nearest(self, halo, axis, lattice):
        """Put the nearest line of the image in the place of those outside of it."""
        pixel, size = self.pixels(axis, lattice), self.table.image_size[axis]
        where = [1, 1, 1, 1]
        where[0], where[1 + axis] = pixel.shape
        pixel = pixel.reshape(where)
        first = -pixel[:, :1, :1]  # the line that is pixel 0
        for edge, missing in ((first, pixel < 0), (first + size - 1, pixel >= size)):
            edge = jnp.clip(edge, 0, lattice.count - 1)
            line = jnp.take_along_axis(halo, edge, axis=1 + axis)
            halo = jnp.where(missing, line, halo)
        return halo

    def by_place(self, values, fill):
        """Lay values [M, C] of blocks out by place: [N, places, C], ``fill`` where none is."""
        images, down, right = self.table.grid.shape
        grid = self.table.grid.reshape(images, down * right)
        row = jnp.where((grid >= 0) & (grid < self.limit), grid, self.rows)
        return _taken(values, row, fill)

    def of_images(self, values):
        """Return the row of each block's image in values [N, C]: [M, C]; 0 where it is no block.

        By way of all places, so that no two blocks read the same: see the head of this file.
        """
        images, down, right = self.table.grid.shape
        spread = jnp.broadcast_to(values[:, None], (images, down * right, values.shape[1]))
        place = (self.n * down + self.hi) * right + self.wi
        place = jnp.where(self.valid, place, images * down * right)
        spread = spread.reshape(images * down * right, values.shape[1])
        return _taken(spread, place, 0)


def _taken(array, index, fill):
    """Return ``array[index]``, ``fill`` where an index is the length; of an empty array, too."""
    if not array.size:
        return jnp.full((*index.shape, *array.shape[1:]), fill, array.dtype)
    return array.at[index].get(mode="fill", fill_value=fill)
