"""Launches of the CUDA kernels that normalize a stack of blocks in training, and of the gradients.

    norm = StackNorm(...)                              sizes
    find = prepare_stack_statistics(norm, "float", eps)
    find(x, bin_counts, active_block_indices, weight, bias, running_mean, running_var, partials,
         statistics, momentum)
    find = prepare_stack_running(norm, "float", eps)
    find(running_mean, running_var, weight, bias, statistics, Number(0))
    find = prepare_stack_image_norm(norm, "float", in_group, eps, settled)
    find(x, bin_counts, active_block_indices, weight, bias, partials, moments, scale, shift)
    apply = prepare_stack_norm(norm, activation)
    apply(x, residual, statistics, bin_counts, active_block_indices, y)
    find = prepare_stack_norm_sums(norm, "float", activation)
    find(grad, x, y, statistics, bin_counts, active_block_indices, partials, dweight, dbias,
         factors)
    apply = prepare_stack_norm_grad(norm, activation)
    apply(grad, x, y, statistics, factors, bin_counts, active_block_indices, dx, dresidual)

The statistics of ``prepare_stack_running`` are the running ones, for a norm in evaluation. Those of
``prepare_stack_image_norm`` are of each image and each group of ``in_group`` channels, of all
pixels of the image: those in no block are 0. It leaves ``scale`` and ``shift``, ``[N, C]``;
``moments`` holds ``norm.moments`` numbers, and is not used where a group is one channel. The blocks
of an image must follow each other in the list. ``settled`` promises that no kernel that still runs
writes the count, nor, of several images, the list of blocks.
weight, bias, running_mean and running_var are of one dtype, "float" above, and may be None, as may
residual, dweight, dbias, dx and dresidual. For the gradients the activation is found from ``x``; or
from ``y``, with relu, where there was a residual; else y is None. ``momentum`` is a
:class:`~sbnet_cupy.core.launch.Number`. ``partials`` holds ``norm.partials`` numbers,
``statistics`` 5 rows of a number for each channel (mean, variance, one over the standard deviation,
scale, shift) and the number of pixels, and ``factors`` 2 rows; all in float32, float64 for float64.
"""

import math
from typing import NamedTuple

from ...core import launch as kernels
from . import channel_vectors

STATISTICS = ("mean", "variance", "deviation", "scale", "shift")  # rows, as in the header
_MOST_PIXELS = 2**30
_EACH = 4  # pixels of a thread, at least
_SUMMED = 264  # thread blocks that sum up: as many as an H200 holds at once
_WRITTEN = 2112  # that write a stack
_FINISHED = 4  # channels of a thread block, as in the header


class StackNorm(NamedTuple):
    """A norm: sizes in pixels."""

    element: str  # C++ type: Half, BFloat16, float or double
    element_bytes: int
    rows: int  # of the stack: its capacity
    images: int
    grid: tuple[int, int]  # blocks of an image
    channels: int
    block: tuple[int, int]
    image: tuple[int, int]
    alignment: int = 16  # bytes of which the addresses of stacks are multiples
    whole: bool = False  # every row below the count is known to be a block, inside its image

    vector, vectors = channel_vectors.vector, channel_vectors.vectors
    lanes, slices = channel_vectors.lanes, channel_vectors.slices

    def groups(self, most):
        """Return the number of ranges of pixels: with the slices about ``most`` thread blocks."""
        pixels = self.rows * math.prod(self.block)
        at_least = _EACH * (kernels.THREADS // self.lanes)
        return max(min(-(-pixels // at_least), most // self.slices), 1)

    @property
    def partials(self):
        """Numbers that ranges leave in memory."""
        return self.groups(_SUMMED) * (2 * self.channels + 1)

    @property
    def image_groups(self):
        """The number of ranges of pixels of each image."""
        return max(self.groups(_SUMMED) // max(self.images, 1), 1)

    @property
    def image_partials(self):
        """Numbers that ranges of all images leave in memory."""
        return self.images * self.image_groups * (2 * self.channels + 1)

    @property
    def moments(self):
        """Numbers that say what the active pixels of each image are like."""
        return self.images * (2 * self.channels + 1)

    @property
    def compute(self):
        """C++ type that sums are in."""
        return "double" if self.element == "double" else "float"

    @property
    def fits(self):
        """Whether the kernels can count its pixels."""
        return self.rows * math.prod(self.block) < _MOST_PIXELS and max(self.image) < _MOST_PIXELS


def prepare_stack_statistics(norm, parameter, eps):
    """Return the launch that finds statistics, and follows them with the running ones."""
    stem = "block_sparse/stack/stack_batch_norm"
    groups = norm.groups(_SUMMED)
    sums = _prepare_moments(norm, groups, 1, settled=False)
    finish = _prepare_finish(
        stem, "stack_norm_finish", norm, parameter, 7, (norm.channels, groups, float(eps))
    )
    return kernels.Series((sums, (0, 1, 2, 7)), (finish, (7, 3, 4, 5, 6, 8, 9)))


def prepare_stack_image_norm(norm, parameter, in_group, eps, settled=False):
    """Return the launch that finds the scale and shift of each channel of each image."""
    stem, groups = "block_sparse/stack/stack_batch_norm", norm.image_groups
    pixels, single = float(math.prod(norm.image)), in_group == 1
    sums = _prepare_moments(norm, groups, norm.images, settled)
    blocks = norm.images * -(-norm.channels // _FINISHED)
    scalars = norm.channels, groups, norm.images, pixels, float(eps)
    finish = _prepare_finish(stem, "stack_image_norm_finish", norm, parameter, 6, scalars, blocks)
    first = (sums, (0, 1, 2, 5)), (finish, (5, 3, 4, 7, 8, None if single else 6))
    if single:
        return kernels.Series(*first)
    scalars = norm.channels, in_group, norm.images, pixels, float(eps)
    blocks = norm.images * (norm.channels // in_group)
    last = _prepare_finish(stem, "stack_group_norm_finish", norm, parameter, 5, scalars, blocks)
    return kernels.Series(*first, (last, (6, 3, 4, 7, 8)))


def prepare_stack_running(norm, parameter, eps):
    """Return the launch that makes statistics of the running ones."""
    finish = _prepare_finish(
        "block_sparse/stack/stack_batch_norm", "stack_norm_finish", norm, parameter, 7,
        (norm.channels, 0, float(eps)),
    )  # fmt: skip
    return kernels.Series((finish, (None, 2, 3, 0, 1, 4, 5)))


def prepare_stack_norm(norm, activation):
    """Return the launch that normalizes; ``activation`` is a number as in activation.cuh."""
    stem, groups = "block_sparse/stack/stack_batch_norm", norm.groups(_WRITTEN)
    return _prepare_pass(stem, "stack_norm_apply", norm, (activation,), 6, groups)


def prepare_stack_norm_sums(norm, parameter, activation):
    """Return the launch that finds the parameters' gradients, and what that of x is made of."""
    stem = "block_sparse/stack/stack_batch_norm_grad"
    groups = norm.groups(_SUMMED)
    sums = _prepare_pass(stem, "stack_norm_grad_sums", norm, (activation,), 7, groups)
    finish = _prepare_finish(
        stem, "stack_norm_grad_finish", norm, parameter, 5, (norm.channels, groups)
    )
    return kernels.Series((sums, range(7)), (finish, (6, 3, 7, 8, 9)))


def prepare_stack_norm_grad(norm, activation):
    """Return the launch that writes the gradients of x and of the residual."""
    stem, groups = "block_sparse/stack/stack_batch_norm_grad", norm.groups(_WRITTEN)
    return _prepare_pass(stem, "stack_norm_grad_apply", norm, (activation,), 9, groups)


def _prepare_moments(norm, groups, images, settled):
    """Return the launch that leaves moments of ranges, so many of each image or of all as one."""
    stem, kernel = "block_sparse/stack/stack_batch_norm", "stack_norm_moments"
    return _prepare_pass(stem, kernel, norm, (), 4, groups, images, (images, int(settled)))


def _prepare_pass(stem, kernel, norm, template, pointers, groups, images=1, more=()):
    """Return the launch of a kernel that looks at the pixels of a stack; ``more`` are scalars."""
    return kernels.prepare(
        stem,
        kernel,
        (norm.element, f"Bytes<{norm.vector}>::type", norm.lanes, *template),
        norm.slices * groups * images,
        kernels.THREADS,
        pointers,
        (
            norm.rows, norm.images, *norm.grid, norm.vectors, *norm.block, *norm.image,
            int(norm.whole), groups, *more,
        ),
        persistent=True,
        dependent=True,
    )  # fmt: skip


def _prepare_finish(stem, kernel, norm, parameter, pointers, scalars, blocks=None):
    """Return the launch of a kernel that adds up what ranges left in memory."""
    blocks = -(-norm.channels // _FINISHED) if blocks is None else blocks
    return kernels.prepare(
        stem, kernel, (norm.compute, parameter), blocks, kernels.THREADS, pointers, scalars,
        dependent=True,
    )  # fmt: skip
