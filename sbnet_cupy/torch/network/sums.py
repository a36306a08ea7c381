"""Sums of stacks, some of them enlarged, which wait for more stacks and an activation.

One kernel computes all of it. Where something else reads a sum on the way, that is computed, and
what is left is another sum.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from ...block_sparse.stack.stack_sum import MOST_TERMS, sums
from . import aliases, casts, cuda_affine, cuda_sum
from . import tensor as T
from .plans import AffinePlan, TimedPlan
from .pointwise import step
from .resample import EnlargedPlan

_AS_IT_IS = (1, 1)


class Term(NamedTuple):
    """A stack of a sum, and how many times larger its blocks become, down and across."""

    stack: torch.Tensor
    factors: tuple = _AS_IT_IS


class SumPlan(TimedPlan):
    """``activation(x_0 + x_1 + ...)``, rounded after each sum, as if each were computed."""

    rest = kernel = options = None
    norm = "none"

    def __init__(self, terms, facts, row=None):
        self.terms, self.facts, self.row = terms, facts, row
        self.source = terms[0].stack
        self.dtype, self.shape = self.source.dtype, (0, self.source.shape[1], 0, 0)
        self.residual = self.activation = self.done = None

    def takes(self, residual=None, activation=None):
        """Whether an activation may become part of it; see :func:`summed` for more stacks."""
        return residual is None and self.activation is None

    def apart(self, ahead, steps):
        """Return the sum that is left where the value of ``ahead`` is wanted, too, or None."""
        added = tuple(Term(*given) for func, *given in steps if func is plus)
        if not added:
            return None
        return self.then(terms=(Term(T.value_of(ahead)), *added))

    def _run(self):
        table, (stacks, factors) = self.facts[0], zip(*self.terms, strict=True)
        if factors == (_AS_IT_IS,) * 2:
            call = stacks[0], table, None, None, stacks[1], self.activation
            return table.compute(cuda_affine.affine, *call)
        return table.compute(cuda_sum.total, stacks, factors, table, self.activation)


def plus(value, stack, factors):
    """Return a stack to which one that is enlarged is added: a new tensor, by PyTorch."""
    if factors != _AS_IT_IS:
        stack = F.interpolate(stack, scale_factor=tuple(map(float, factors)))
    return value + stack


def summed(a, b, inplace):
    """Return the sum of two stacks of which one waits to be enlarged, or waits as a sum; or None.

    In place it is what ``a`` waits for from now on.
    """
    if not _lie_alike(a, b):
        return None
    for x, other in [(a, b)] if inplace else [(a, b), (b, a)]:
        ahead = _terms_ahead(x, inplace)
        terms = (*ahead, _term_of(other)) if ahead else ()
        if ahead and _fit(terms, x):
            return _waiting(x, terms, other, inplace, (plus, *terms[-1]))
    if inplace or not any(isinstance(T.plan_of(x), EnlargedPlan) for x in (a, b)):
        return None
    terms = _term_of(a), _term_of(b)
    return _waiting(a, terms, b) if _fit(terms, a) else None


def _lie_alike(a, b):
    """Whether both are images of one call, of one shape, whose pixels lie alike."""
    if not (isinstance(a, T.StackTensor) and isinstance(b, T.StackTensor)):
        return False
    return T.facts(a)[:4] == T.facts(b)[:4] and T.shape(a) == T.shape(b)


def _terms_ahead(x, inplace):
    """Return the terms of the sum that ``x`` waits for, if there is room for one more; or none.

    In place what waits to be enlarged is one, too.
    """
    plan = T.plan_of(x)
    if isinstance(plan, SumPlan) and plan.takes() and len(plan.terms) < MOST_TERMS:
        return plan.terms
    if isinstance(plan, AffinePlan) and plan.is_sum:
        return Term(plan.source), Term(plan.residual)
    return (_term_of(x),) if inplace and isinstance(plan, EnlargedPlan) else ()


def _term_of(x):
    """Return a stack, computed if it waits for anything else than to be enlarged."""
    plan = T.plan_of(x)
    if isinstance(plan, EnlargedPlan):
        return Term(plan.source, plan.factors)
    return Term(T.value_of(x))


def _fit(terms, x):
    """Whether the kernel adds such stacks; float32 under autocast is left to another one.

    That also rounds its result, where convolutions read it so.
    """
    table, block = T.facts(x)[:2]
    dtypes = {stack.dtype for stack, _ in terms}
    if len(dtypes) > 1 or not sums(block):
        return False
    if casts.for_waiting(table) is not None and dtypes == {torch.float32}:
        return False
    return all(stack.dim() == 4 and cuda_affine.fits(stack, table) for stack, _ in terms)


def _waiting(x, terms, other, inplace=False, after=None):
    """Return the sum of x and another, which waits; ``after`` as of :func:`step`, if x waits."""
    table, block, size, hw, reach = T.facts(x)
    reach = max(reach, T.facts(other)[4])
    plan = SumPlan(terms, T.facts(x), None if table.trace is None else table.trace.row)
    if after is None:
        return T.postpone(table, plan, block, size, reach)
    out = step(x, plan, inplace, after)
    aliases.own(out)["_facts"] = table, block, size, hw, reach
    return out
