"""The CUDA kernel that adds stacks, some of which it enlarges as it reads them."""

import math

from ...block_sparse.stack.stack_sum import MOST_TERMS, StackSum, prepare_stack_sum
from . import cuda, joins
from .epilogue import finish

_PLANS = {}  # (device, sizes, settled) -> what launches the kernel


def total(stacks, factors, table, activation=None):
    """Return ``activation(x_0 + x_1 + ...)`` of two to ``MOST_TERMS`` stacks of one dtype.

    Each is ``[M, C, b / f, b / f]``, where its pixels become ``factors`` of it, down and across.
    Sums are rounded one after the other.
    """
    code, like = cuda.code_of(activation), stacks[0]
    block = tuple(n * f for n, f in zip(like.shape[2:], factors[0], strict=True))
    if cuda.may_pad(activation):
        y, stacks, out = joins.place_like(stacks, table, block, like.shape[1])
    else:
        y = out = joins.place(like, table, block, like.shape[1])
    given, parts_of = zip(*map(cuda.rows_and_pitch, stacks), strict=True)
    rows, out_part_of = cuda.rows_and_pitch(out)
    aligned = math.gcd(16, *(t.data_ptr() for t in (*given, rows)))
    facts = (
        like.dtype, *rows.shape, tuple(factors), code or 0, aligned, parts_of, out_part_of,
        table.settled,
    )  # fmt: skip
    launch = cuda.prepared(_PLANS, facts, like, _prepare, *facts)
    none = [None] * (MOST_TERMS - len(given))
    cuda.start(launch, *given, *none, table.counts, rows, order=table.order, out=rows)
    table.settled = True
    return finish(y, None, activation) if code is None else y


def _prepare(
    dtype, rows, height, width, channels, factors, activation, alignment, parts_of, out_part_of,
    settled,
):  # fmt: skip
    sizes = StackSum(
        element=cuda._ELEMENTS[dtype], element_bytes=dtype.itemsize, rows=rows,
        block=(height, width), channels=channels, factors=factors, activation=activation,
        alignment=alignment, parts_of=parts_of, out_part_of=out_part_of,
    )  # fmt: skip
    return prepare_stack_sum(sizes, settled)
