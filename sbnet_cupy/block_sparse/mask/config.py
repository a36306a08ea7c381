"""How reduce_mask shares out a mask: which thread block reads what, and how; see its kernel.

Pure arithmetic on shapes and alignments, never on the mask: nothing here depends on data.
"""

import math
from typing import NamedTuple

_THREADS = 256
_PER_SM = 3  # thread blocks per multiprocessor: they fill it, and few wait for each other
_GROUPS = ((1, 512), (8, 256), (8, 512))  # thread blocks together, and the threads of each
_MOST_BITS = 1 << 16  # columns of a thread block in shared memory (max)
_MOST_SUMS = 1 << 12  # likewise, 8 bytes each (average)
_MOST_FLAGS = 1 << 14  # candidates of a thread block
_MOST_SM = 512  # more multiprocessors than any GPU has


def scratch_slots(shape, blocks, grid, average):
    """Return how many 8-byte slots a launch for a mask can need, on any GPU."""
    fewest = _share(shape, blocks, grid, _MOST_SUMS if average else _MOST_BITS, 1)[2]
    return 1 + min(math.prod(blocks), max(_PER_SM * _MOST_SM, fewest))


class MaskConfig(NamedTuple):
    """How the candidates are shared out."""

    lines: int  # rows of candidates of a thread block, and
    span: int  # candidates of each; fewer than there are only where it has a single line
    extent: int  # columns of the mask under them
    stored: int  # columns that shared memory has room for
    word: int  # elements that a thread reads at a time
    lanes: bool  # a warp reads 32 neighbouring ones
    down: int  # readers, threads or warps, that share the rows of the mask under a line
    threads: int
    together: int  # thread blocks of the one cluster, or 0: any number, which look back
    thread_blocks: int


def configure_mask(shape, item, word, blocks, grid, average, sm_count, clusters):
    """Share out the candidates of a mask whose rows divide into words of ``item``-byte elements.

    Where all of it can be read at once, by one thread block, by a cluster, or by as many as the GPU
    holds, each reader has one round of loads: what counts is latency. Else each thread block takes
    what keeps the memory busy.
    """
    stored = _MOST_SUMS if average else _MOST_BITS
    word = min(word, 4) if average else word  # a thread has a sum for each
    rows = min(grid.bsize[0], shape[1])
    for lanes in (False,) if average or word * item == 16 else (True, False):
        step, least = (32, 20) if lanes else (word, 6)
        for together, threads in _GROUPS if clusters else _GROUPS[:1]:
            readers = threads // 32 if lanes else threads
            share = _share(shape, blocks, grid, stored, together)
            words = share[0] * -(-_extent(shape, grid, share[1]) // step)
            if share[2] <= together and words * -(-rows // least) <= readers:
                return _finish(shape, grid, share, stored, word, lanes, rows, together, threads)
        share = _all_at_once(shape, blocks, grid, step, -(-rows // least), lanes)
        if share[2] <= _PER_SM * sm_count:
            return _finish(shape, grid, share, stored, word, lanes, rows, 0, _THREADS)
    share = _share(shape, blocks, grid, stored, _PER_SM * sm_count)
    lanes = not average and (word == 1 or word * item < 4)
    return _finish(shape, grid, share, stored, word, lanes, rows, 0, _THREADS)


def _all_at_once(shape, blocks, grid, step, times, lanes):
    """Return the share of thread blocks whose readers have one round of loads each.

    A reader takes ``step`` columns of a line, and one of ``times`` parts of its rows.
    """
    lines, count = blocks[0] * blocks[1], blocks[2]
    readers = _THREADS // 32 if lanes else _THREADS

    def needed(span):
        return -(-_extent(shape, grid, span) // step) * times

    parts = -(-needed(count) // readers)
    while needed(-(-count // parts)) > readers and parts < count:
        parts += 1
    share = min(readers // needed(count), _MOST_FLAGS // count) if parts == 1 else 1
    share, span = max(share, 1), min(-(-count // parts), _MOST_FLAGS)
    return share, span, -(-lines // share) * -(-count // span)


def _finish(shape, grid, share, stored, word, lanes, rows, together, threads):
    """Return the configuration for a share."""
    lines, span, thread_blocks = share
    extent = _extent(shape, grid, span)
    word = 1 if lanes else word
    words = lines * -(-extent // (32 if lanes else word))
    readers = threads // 32 if lanes else threads
    down = max(min(readers // words, rows, stored // (lines * (extent + 32))), 1)
    reads = extent, stored, word, lanes, down
    return MaskConfig(lines, span, *reads, threads, together, together or thread_blocks)


def _extent(shape, grid, span):
    """Return how many columns of the mask so many candidates of a line cover."""
    return min(grid.bstride[1] * (span - 1) + grid.bsize[1], shape[2])


def _share(shape, blocks, grid, stored, wanted):
    """Return (lines, candidates of each, thread blocks), about as many as wanted.

    What a thread block has of the mask's columns must fit in ``stored``, and 32 more of each line;
    only where it has a single candidate they need not.
    """
    lines, count = blocks[0] * blocks[1], blocks[2]
    fit = min(stored // (_extent(shape, grid, count) + 32), _MOST_FLAGS // count)
    share = min(-(-lines // wanted), max(fit, 1))
    span = count
    if share == 1:
        span = min(-(-count // max(wanted // lines, 1)), _MOST_FLAGS)
        if _extent(shape, grid, span) + 32 > stored:
            span = max((stored - 32 - grid.bsize[1]) // grid.bstride[1] + 1, 1)
    return share, span, -(-lines // share) * -(-count // span)


def shared_memory(config, average):
    """Return (words of a line that are kept apart, bytes for them) of a thread block."""
    step = 32 if config.lanes else config.word
    slots = config.stored // step
    columns = step * min(config.extent // step + 2, slots)
    if average:
        return slots, 8 * config.lines * config.down * (columns + columns // 16 + 1)
    return slots, -(-4 * config.lines * -(-columns // 32) // 8) * 8
