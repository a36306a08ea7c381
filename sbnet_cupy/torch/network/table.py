"""Where the blocks of a call lie: the list and the grid.

A table is made once from the mask. The image is cut into blocks of ``block`` input pixels; after a
stride the same blocks are smaller, so one list of blocks serves all stages of a network.
"""

import functools

import torch
from torch.nn import functional as F

from . import cuda_ends, cuda_pool, per_image
from .neighbours import pixels_of

INSIDE_MODES = ("replicate", "reflect", "circular")


class Table:
    """What the two kinds of tables share: the batch, the grid, and the active blocks in it.

    Attributes
    ----------
    batch : int
        Images.
    grid : (int, int)
        Blocks of an image, down and across.
    on : bool tensor, shape (N, *grid)
        The active blocks.
    """

    whole = False
    static = False  # whether no number of the mask may be read
    settled = False  # whether a kernel that waited for the table has run since it was written
    refusal = None  # of an operator that was called below PyTorch's functions

    def __init__(self, blocks, block, size, device):
        self.batch, *grid = blocks
        self.grid = tuple(grid)
        self.block, self.size, self.device = block, size, device
        self.block_of = {size: block}  # of each size of an image that a stage has
        self.kept = {}
        self.plans = {}
        self.trace = None
        self.weights = None
        self.tape = None  # of a call that is recorded
        self.joins = None  # of a call, what is written side by side: joins.JoiningCall
        self.order = None  # in a capture, of a call's kernels: order.CallOrder
        self.borders = False
        self.in_order = True  # whether what is made lies as N, C, H, W in the dense network
        self.left = None  # functions by which anything left the stack, with modules: left.watch
        self.lent = []  # weak references to activations that are copies, once something is written
        self.rests = []  # and to those of which it is known what they hold where the input is 0
        self.overlapping = []  # pairs of parts that have pixels in common: aliases.Part
        self.reduced = None
        self.model = None  # the network, where it is called as usual
        self.occupied = False  # whether a block is known on the host to be active
        self.made = None  # weak references to all activations, where their reach is measured

    def keep(self, key, make):
        """Return what ``make()`` returned for this key, made once in a call."""
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def compute(self, func, *args, **kwargs):
        """Call a function of values of the call, and note it where the call is recorded."""
        if self.tape is None:
            return func(*args, **kwargs)
        self.tape.begin()
        result = func(*args, **kwargs)
        self.tape.note(func, args, kwargs, result)
        return result

    def fits(self, block, size):
        """Whether the blocks of the grid cover an image of this size."""
        return all(s <= g * b for s, g, b in zip(size, self.grid, block, strict=True))

    def stage(self, block, size, new):
        """Return the block of a picture that was resampled to a size: that of a stage, or None.

        The stage was seen, or its size is a whole multiple or part of the picture's.
        """
        if new in self.block_of:
            return self.block_of[new]
        out = []
        for b, old, n in zip(block, size, new, strict=True):
            times = max(round(n / old), 1) if old else 1
            parts = max(round(old / n), 1) if n else 1
            if old * times == n:
                out.append(b * times)
            elif n and old // parts == n and b % parts == 0:
                out.append(b // parts)
            else:
                return None
        return tuple(out) if self.fits(out, new) else None

    def resumes(self, block, size, new):
        """Whether an image that lost or got a row or a column has the size of its stage again."""
        near = all(abs(s - n) <= min(1, b - 1) for b, s, n in zip(block, size, new, strict=True))
        return near and self.block_of.get(new) == block

    def coarser(self, block, new):
        """Return by how many pixels of the input those of smaller blocks are longer, or 0.

        So much further away is what one of them covers, and so much is added to the reach.
        """
        sides = zip(self.block, block, new, strict=True)
        return max(0, *(whole / n - whole / b for whole, b, n in sides))

    def divides(self, block, size):
        """Whether an image of this size is cut into whole blocks."""
        return all(s == g * b for s, g, b in zip(size, self.grid, block, strict=True))

    def filled(self, block, size):
        """Whether every pixel of the stack is known to be one of an image."""
        return self.divides(block, size) and self.known_live

    def active_map(self, block, size):
        """Return which pixels of a stage lie in active blocks: bool ``[N, H, W]``."""

        def make():
            rows = self.on.repeat_interleave(block[0], 1)[:, : size[0]]
            return rows.repeat_interleave(block[1], 2)[:, :, : size[1]]

        return self.keep(("map", block, size), make)

    def reduce_pixels(self, value, block, size, hw, mode):
        """Take the "mean" or "sum" of all pixels of each image, ``[N, ...]`` without ``hw``."""
        if mode == "sum":
            return self.sum_pixels(value, block, size, hw)
        wide = torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype
        sums = self.sum_pixels(value, block, size, hw, wide)  # which float16 may be too small for
        return (sums / (size[0] * size[1])).to(value.dtype)

    def mean_inside(self, value, block, size):
        """Return mean and biased variance of each channel over active pixels, and their number."""
        return _moments(value, self.inside(block, size)[:, None])

    def has_pixels(self, block, size):
        """Return whether an active block has a pixel of a stage, as a tensor; None for yes."""
        if not self.divides(block, size):
            key = "has pixels", block, size
            return self.keep(key, lambda: self.active_pixels(block, size).any())
        return None if self.occupied else self.keep("has blocks", lambda: self.on.any())

    def active_pixels(self, block, size):
        """Return how many pixels of each image lie in active blocks: int64 ``[N]``."""

        def make():
            parts = (
                self.on[:, rows, columns].sum((1, 2)) * (height * width)
                for rows, height in _lengths(block[0], size[0])
                for columns, width in _lengths(block[1], size[1])
            )
            return functools.reduce(torch.add, parts)

        return self.keep(("pixels", block, size), make)


def _lengths(block, size):
    """Return the blocks along an axis that lie in the image whole, and one that is cut: length."""
    whole, rest = divmod(size, block)
    cut = [(slice(whole, whole + 1), rest)] if rest else []
    return [(slice(whole), block), *cut]


class BlockTable(Table):
    """Active blocks as rows of a stack ``[M, C, b, b]``.

    Parameters
    ----------
    counts : int32 tensor, shape (1,)
        Number of active blocks, also where there is no row for each.
    indices : int32 tensor, shape (M, 3)
        Rows (n, hi, wi); -1 past the count. One row at least.
    places : int32 tensor, shape (N, *grid)
        Row of the block at each place, or -1.
    block, size : (int, int)
        A block and the image in input pixels.
    known_live : bool
        Whether every row is known on the host to be a block.
    """

    def __init__(self, counts, indices, places, block, size, known_live=False):
        super().__init__(places.shape, block, size, places.device)
        self.counts, self.indices, self.places = counts, indices, places
        self.rows, self.known_live = indices.shape[0], known_live
        self.deep = None  # in a capture, an event of when layers begin that leave memory idle

    @classmethod
    def of_blocks(cls, on, capacity, count, block, size):
        """List active blocks, bool ``[N, *grid]``; those past ``capacity`` are left out.

        ``count`` is their number where the host knows it.
        """
        flat, rows = on.reshape(-1), max(capacity, 1)
        if count is not None and count <= capacity:
            listed = on.nonzero()
            if count == 0:
                listed = listed.new_full((1, 3), -1)
        else:
            listed = on.new_full((rows + 1, 3), 0, dtype=torch.int64)
            ranks = flat.cumsum(0) - 1
            at = torch.where(flat & (ranks < capacity), ranks, rows)
            _, h, w = on.shape
            cells = torch.arange(flat.numel(), device=on.device)
            triples = torch.stack([cells // (h * w), cells // w % h, cells % w], 1)
            listed = torch.full_like(listed, -1).index_copy_(0, at, triples)[:rows]
        return cls.of_rows(listed, on, capacity, count, block, size)

    @classmethod
    def of_rows(cls, listed, on, capacity, count, block, size):
        """Make the grid of a list of rows, int64 ``[M, 3]``."""
        flat, ranks = on.reshape(-1), on.reshape(-1).cumsum(0) - 1
        places = torch.where(flat & (ranks < capacity), ranks, -1).to(torch.int32).view(on.shape)
        counts = flat.sum(dtype=torch.int32).view(1)
        known = count is not None and min(count, capacity) >= max(capacity, 1)
        return cls(counts, listed.to(torch.int32).contiguous(), places, block, size, known)

    @functools.cached_property
    def on(self):
        """The blocks that have a row: bool ``[N, *grid]``."""
        return self.places >= 0

    @functools.cached_property
    def place(self):
        """Row of the block at each place, and the number of rows where there is none."""
        return torch.where(self.places < 0, self.rows, self.places).long()

    @functools.cached_property
    def live(self):
        """Which rows are blocks."""
        return self.indices[:, 0] >= 0

    @functools.cached_property
    def _triples(self):
        return self.indices.long().clamp_(min=0).unbind(1)

    @property
    def image(self):
        """The image of each row."""
        return self._triples[0]

    @property
    def down(self):
        """Which block each row is, from the top."""
        return self._triples[1]

    @property
    def across(self):
        """Which block each row is, from the left."""
        return self._triples[2]

    @functools.cached_property
    def cells(self):
        """Number of the block of each row among all blocks; past the last one for none."""
        gh, gw = self.grid
        at = (self.image * gh + self.down) * gw + self.across
        return torch.where(self.live, at, self.batch * gh * gw)

    def inside(self, block, size):
        """Return which pixels of the stack lie in the image and in a listed block."""

        def make():
            y = pixels_of(self.down, block[0]) < size[0]
            x = pixels_of(self.across, block[1]) < size[1]
            return y[:, :, None] & x[:, None, :] & self.live[:, None, None]

        return self.keep(("inside", block, size), make)

    def gather(self, image, block, hw):
        """Cut an image ``[N, ...]`` with height and width at ``hw`` into the stack's blocks."""
        blocks = cuda_ends.gather(image, self, block, hw)
        if blocks is not None:
            return blocks
        order = _to_front(image.dim(), hw)
        y = image.permute(order)
        short = [g * b - s for g, b, s in zip(self.grid, block, y.shape[1:3], strict=True)]
        if any(short):
            y = F.pad(y, [0, 0] * (y.dim() - 3) + [0, short[1], 0, short[0]])
        y = y.unflatten(1, (self.grid[0], block[0])).unflatten(3, (self.grid[1], block[1]))
        y = y.transpose(2, 3)[self.image, self.down, self.across]
        return y.permute(_inverse(order))

    def cut(self, image, block, hw):
        """Cut an image as :meth:`gather` does, for functions of single pixels.

        Where gradients are recorded, what lies outside the image is its edge: x / 0 would make NaN
        of the gradients of weights, though no such pixel counts.
        """
        size = (image.shape[hw[0]], image.shape[hw[1]])
        if torch.is_grad_enabled() and not self.divides(block, size):
            for axis, cells, length, last in zip(hw, self.grid, block, size, strict=True):
                pixels = torch.arange(cells * length, device=image.device).clamp_(max=last - 1)
                image = image.index_select(axis, pixels)
        return self.gather(image, block, hw)

    def scatter(self, value, block, size, hw):
        """Return a stack as an image, 0 where no listed block lies."""
        image = cuda_ends.scatter(value, self, block, size, hw)
        if image is not None:
            return image
        order = _to_front(value.dim(), hw)
        y, (gh, gw) = value.permute(order), self.grid
        rest = y.shape[3:]
        if self.known_live:
            out = y.new_zeros(self.batch, gh, block[0], gw, block[1], *rest)
            out.transpose(2, 3)[self.image, self.down, self.across] = y
            out = out.flatten(3, 4).flatten(1, 2)
        else:  # rows past the count fall into one more block, which is dropped
            out = y.new_zeros(self.batch * gh * gw + 1, *block, *rest)
            out = out.index_put((self.cells,), y)  # index_copy keeps y for the gradient
            out = out[:-1].unflatten(0, (self.batch, gh, gw))
            out = out.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return out[:, : size[0], : size[1]].permute(_inverse(order))

    def spread(self, given):
        """Repeat what is given for each image for each of its rows."""
        return per_image.repeat(given, self.image, self.place)

    def sum_pixels(self, value, block, size, hw, dtype=None):
        """Sum active pixels inside the image: ``[M, ...]`` to ``[N, ...]`` without ``hw``.

        The sums are of ``dtype``, and so is what is added up; None is that of ``value``.
        """
        if not self.filled(block, size):
            shape = [value.shape[0]] + [1] * (value.dim() - 1)
            shape[hw[0]], shape[hw[1]] = block
            value = torch.where(self.inside(block, size).view(shape), value, 0)
        rows = value.sum(hw, dtype=dtype)
        if self.batch == 1:
            return rows.sum(0, keepdim=True)
        return per_image.add_up(rows, self.image, self.place)

    def reduce_pixels(self, value, block, size, hw, mode):
        """Take the "mean" or "sum" of all pixels of each image, ``[N, ...]`` without ``hw``."""
        if value.dim() == 4 and hw in ((2, 3), (1, 2)):
            stack = value if hw == (2, 3) else value.permute(0, 3, 1, 2)
            pooled = cuda_pool.global_pool(stack, self, block, size, mode)
            if pooled is not None:
                return pooled
        return super().reduce_pixels(value, block, size, hw, mode)

    def max_pixels(self, value, block, size):
        """Take the maximum of all pixels of each image: ``[M, C, *block]`` to ``[N, C]``."""
        pooled = cuda_pool.global_pool(value, self, block, size, "max")
        if pooled is not None:
            return pooled
        if not self.filled(block, size):
            value = torch.where(self.inside(block, size)[:, None], value, -torch.inf)
        rows = F.adaptive_max_pool2d(value, 1).flatten(1)
        none = rows.new_tensor([[0.0], [-torch.inf]]).expand(2, rows.shape[1])
        down, across = (
            torch.arange(n, device=self.device) * b < s
            for n, b, s in zip(self.grid, block, size, strict=True)
        )  # which places have pixels of an image, that are 0 in blocks that are not active
        empty = (self.place == self.rows) & ~(down[:, None] & across)
        at = torch.where(empty, self.rows + 1, self.place).flatten(1)
        return torch.cat([rows, none])[at].max(1).values


class PictureTable(Table):
    """Whole images in place of blocks, kept 0 outside the active blocks: for well filled masks."""

    whole = True

    def __init__(self, mask, block, size, full=False):
        grid = (-(-s // b) for s, b in zip(size, block, strict=True))
        super().__init__((mask.shape[0], *grid), block, size, mask.device)
        self.mask, self.rows = mask, self.batch * self.grid[0] * self.grid[1]
        self.full = self.known_live = full

    @functools.cached_property
    def on(self):
        """The active blocks."""
        return active_blocks(self.mask, self.block, not self.static)

    def _mask(self, value, block, size, hw):
        shape = [self.batch] + [1] * (value.dim() - 1)
        shape[hw[0]], shape[hw[1]] = size
        return self.active_map(block, size).view(shape)

    def gather(self, image, block, hw):
        """Zero an image outside active blocks."""
        if self.full:
            return image
        size = (image.shape[hw[0]], image.shape[hw[1]])
        return image.masked_fill(~self._mask(image, block, size, hw), 0)

    def inside(self, block, size):
        """Return which pixels of images lie in active blocks: bool ``[N, H, W]``."""
        return self.active_map(block, size)

    def cut(self, image, block, hw):
        """Return an image, for functions of single pixels: what they make elsewhere is never read.

        Where gradients are recorded it is 0 there: NaN would be in those of weights.
        """
        return self.gather(image, block, hw) if torch.is_grad_enabled() else image

    def zero(self, value, block, hw):
        """Zero an activation outside active blocks: in place, where it is what it holds anyway."""
        size = (value.shape[2], value.shape[3]) if hw == (2, 3) else None
        if self.full or torch.is_grad_enabled() or not size:
            return self.gather(value, block, hw)
        if value.is_cuda or self.static:  # the host cannot list the blocks
            off = self.keep(("off", block, size), lambda: ~self._mask(value, block, size, hw))
            return value.masked_fill_(off, 0)
        if not self.divides(block, size):
            return self.gather(value, block, hw)
        blocks = value.unflatten(2, (self.grid[0], block[0])).unflatten(4, (self.grid[1], block[1]))
        off = self.keep("off", lambda: (~self.on).nonzero().unbind(1))
        blocks.permute(0, 2, 4, 3, 5, 1)[off] = 0
        return value

    def scatter(self, value, block, size, hw):
        """Zero an image outside active blocks."""
        return self.gather(value, block, hw)

    def spread(self, given):
        """Return what is given for each image."""
        return given

    def sum_pixels(self, value, block, size, hw, dtype=None):
        """Sum active pixels, as numbers of ``dtype``."""
        return self.gather(value, block, hw).sum(hw, dtype=dtype)

    def max_pixels(self, value, block, size):
        """Take the maximum of all pixels of each image: ``[N, C, H, W]`` to ``[N, C]``."""
        return F.adaptive_max_pool2d(self.gather(value, block, (2, 3)), 1).flatten(1)

    def mean_inside(self, value, block, size):
        """Return mean and biased variance of each channel over active pixels, and their number."""
        return _moments(value, self._mask(value, block, size, (2, 3)))


def _moments(value, inside):
    wide = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    count = inside.sum().clamp(min=1).to(wide.dtype)
    mean = torch.where(inside, wide, 0).sum((0, 2, 3)) / count
    apart = torch.where(inside, wide - mean[:, None, None], 0)
    return mean, apart.square().sum((0, 2, 3)) / count, count


def _to_front(dims, hw):
    return (0, *hw, *(i for i in range(1, dims) if i not in hw))


def _inverse(order):
    return tuple(order.index(i) for i in range(len(order)))


def rows_for(count, total):
    """Return the rows of a stack for ``count`` of ``total`` blocks: an eighth more at most.

    Masks of about as many blocks then have stacks of one size, and with it what was planned,
    compiled and captured for it.
    """
    step = 1 << max(count.bit_length() - 4, 0)
    return min(-(-count // step) * step, total)


def active_blocks(mask, block, as_words=True):
    """Return which blocks of a mask ``[N, H, W]`` hold a set pixel: bool ``[N, gh, gw]``.

    ``as_words`` looks at eight pixels at once, which torch.compile cannot.
    """
    n, h, w = mask.shape
    grid = (-(-h // block[0]), -(-w // block[1]))
    short = (0, grid[1] * block[1] - w, 0, grid[0] * block[0] - h)
    mask = F.pad(mask, short) if any(short) else mask
    as_words = as_words and block[1] % 8 == 0
    if as_words and mask.is_contiguous() and mask.storage_offset() % 8 == 0:
        mask = mask.view(torch.int64) != 0
        block = (block[0], block[1] // 8)
    return mask.view(n, grid[0], block[0], grid[1], block[1]).any(4).any(2)
