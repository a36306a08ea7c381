"""Plan: a convolution or a batch norm of a stack that waits for the sum and activation after it."""

import contextlib
import copy

import torch
from torch.nn import functional as F

from .._dispatch_state import saved_tensor_hooks
from . import casts, cuda, cuda_affine, cuda_resize, gradients, onednn, ops, shortcuts, units
from . import tensor as T
from .entry import Entry
from .epilogue import before_sum, finish, scaled_last
from .image_values import Held
from .weights import fold

_TRAINED = ("relu", "silu", "gelu")  # activations that may follow a batch norm in training


class Plan:
    """A convolution and what follows it: ``activation(norm(conv(x)) + residual)``.

    Or ``activation(norm(conv(x))) + residual``; then the name of the activation says so. Behind all
    that channels may be scaled and shifted, as by a batch norm that follows an activation.

    ``facts`` are those of the stack that it reads, ``options`` the keywords of ``ops.conv``, ``to``
    is the dtype to which autocast converts, or None. The source is a stack, or a convolution that
    waits too (:class:`~.units.Ahead`).
    """

    records = None  # whether gradients are recorded, of what waits while they may be
    is_norm = False  # whether it is a batch norm by itself
    readers = 0  # convolutions that wait for it
    adds_behind = True  # whether kernels can add a residual behind an activation
    to = None
    last = None  # by what channels are scaled behind all else: see Weights.behind

    def __init__(self, source, facts, weight, bias, options, to=None, row=None):
        self.source, self.facts, self.weight, self.bias = source, facts, weight, bias
        self.options, self.to, self.row = options, to, row
        self.dtype = casts.after(source.dtype, to)
        self.norm = self.residual = self.activation = None
        self.done = None  # the result, for those who still wait for it
        self.shape = (0, weight.shape[0], 0, 0)

    @property
    def device(self):
        """The device of the result."""
        return self.source.device

    @property
    def kernel(self):
        """Height and width of the kernel."""
        return tuple(self.weight.shape[2:])

    def then(self, **changes):
        """Return the plan with one more step."""
        plan = object.__new__(type(self))
        vars(plan).update(vars(self), **changes)
        return plan

    requires_grad = False  # where gradients are recorded nothing waits, but for a TrainedNorm

    def takes(self, residual=None, activation=None):
        """Whether a sum or an activation may become part of it: only one of each."""
        if self.last is not None:
            return False
        if self.activation is None:
            return residual is None or self.residual is None
        if residual is None or self.residual is not None or not self.adds_behind:
            return False
        source = units.source_of(self)
        by_kernel = isinstance(source, torch.Tensor) and cuda.serves(source)
        return by_kernel and cuda.code_of(self.activation) is not None

    def takes_last(self, *parameters):
        """Whether channels may be scaled and shifted behind its activation, by parameters."""
        table, is_plain = self.facts[0], self.adds_behind and "pads" in (self.options or ())
        if not is_plain or table.whole or table.weights is None or table.tape is not None:
            return False
        if self.last is not None or (cuda.code_of(self.activation) or 0) <= 0:
            return False
        given = [p for p in parameters if p is not None]
        if cuda.records(*given) or any(p.dtype not in (self.dtype, torch.float32) for p in given):
            return False
        source = units.source_of(self)
        source = source.image if isinstance(source, Entry) else source
        return isinstance(source, torch.Tensor) and cuda.serves(source)

    def plus(self, residual):
        """Return the plan with a residual that it takes."""
        activation = self.activation and before_sum(self.activation)
        return self.then(residual=residual, activation=activation)

    def narrowed(self, dtype):
        """Return the plan of the result in a narrower dtype, with the same rounding, or None."""
        return None

    def run_both(self, dtype):
        """Compute the result, and that in a narrower dtype: a pair; or return None."""
        return None

    def reads(self, x):
        """Whether the source, one ahead of it, or the residual is that of ``x``, which waits."""
        if isinstance(self.residual, units.Ahead) and self.residual.of() is x:
            return True
        source = self.source
        while isinstance(source, units.Ahead):
            if source.of() is x:
                return True
            source = source.plan.source
        return False

    def run(self):
        """Compute."""
        table, block, size, _, _ = self.facts
        source, residual = self.source, self.residual
        timed = table.trace and table.trace.timed
        if isinstance(source, units.Ahead):
            y = timed(self.row, units.run, self) if timed else units.run(self)
            if y is not None:
                return y
            source = source.value()
        source = source.cast(self.to) if isinstance(source, Entry) else casts.cast(source, self.to)
        weight, bias = self._folded(table.weights)
        if isinstance(residual, units.Ahead):
            both = (self, source, weight, bias)
            y = timed(self.row, shortcuts.run, *both) if timed else shortcuts.run(*both)
            if y is not None:
                return y
            residual = residual.value()
        call = (source, table, block, size, weight, bias)
        options = self.options | {"residual": residual, "activation": self.activation}
        if self.last is not None:
            options["scaled"] = table.weights.behind(self.last, self.shape[1])
        if table.trace is None:
            return table.compute(ops.conv, *call, **options)
        return table.trace.timed(self.row, ops.conv, *call, **options)

    def apart(self, ahead, steps):
        """Return the norm that is left to do where the value of ``ahead`` is wanted, too, or None.

        ``steps`` make the result of that value: a function and its arguments each.
        """
        (first, *given), *more = steps
        if first is not normalized or more not in ([], [(F.relu,)]):
            return None
        plan = NormPlan(T.value_of(ahead), T.facts(ahead), *given, self.shape[1], self.row)
        return plan.then(activation="relu") if more else plan

    @property
    def rest(self):
        """A function that returns what the result holds where the input is 0, for each channel.

        None where something is added, which may hold anything there.
        """
        if self.residual is not None:
            return None
        weights, plan = self.facts[0].weights, copy.copy(self)
        plan.source = None  # what is convolved must not live as long as the result

        def make():
            constant = plan._folded(weights)[1]
            if constant is None:
                constant = plan.weight.new_zeros(plan.shape[1])
            constant = finish(constant.clone(), None, plan.activation)
            if plan.last is None:
                return constant
            scaled = weights.behind(plan.last, plan.shape[1])
            return scaled_last(constant[None, :, None, None], scaled).flatten()

        return make

    def _folded(self, weights):
        given, tape = (self.weight, self.bias, self.norm), self.facts[0].tape
        if tape is None:
            return weights.folded(*given, to=self.to)
        if not tape.holds((*given[:2], *(self.norm or ())[:4])):  # weights made in this call
            tape.folds = True
            return self.facts[0].compute(fold, *given, self.to)
        made = weights.folded(*given, to=self.to)
        tape.keep(made)
        return made


class TimedPlan(Plan):
    """A plan that ``_run`` computes, all of it a row of a trace, if there is one."""

    adds_behind = False

    def run(self):
        """Compute."""
        trace = self.facts[0].trace
        return self._run() if trace is None else trace.timed(self.row, self._run)


class NormPlan(TimedPlan):
    """A batch norm of what no convolution waits for, and what follows it, in one new tensor.

    As the first of a pre-activation unit, which reads a sum: its activation is computed in place.
    """

    is_norm = True
    before = None  # what returns what the source holds where the input is 0

    def __init__(self, source, facts, norm, channels, row=None):
        self.source, self.facts, self.norm, self.row = source, facts, norm, row
        self.residual = self.activation = self.done = None
        self.dtype, self.shape = source.dtype, (0, channels, 0, 0)

    kernel = options = None

    @property
    def rest(self):
        """A function that returns what the result holds where the input is 0, or None."""
        if self.before is None or self.residual is not None:
            return None
        before, norm, activation = self.before, self.norm, self.activation
        table = self.facts[0]

        def make():
            if table.tape is not None:
                table.tape.note_weights(norm[:4])
            constant = normalized(before()[None, :, None, None], norm).flatten()
            return finish(constant, None, activation)

        return make

    def _run(self):
        x, table = self.source, self.facts[0]
        rest = self.residual, self.activation
        same = x.dtype in (torch.float32, torch.float64) and x.dtype == self.norm[0].dtype
        kept = x.is_cuda and isinstance(self.norm[2], torch.nn.Parameter)
        if kept or (same and x.device.type == "cpu"):
            shift, scale = table.weights.affine(self.norm)
            if table.tape is not None and table.tape.holds(self.norm[:4]):
                table.tape.keep((shift, scale))
            if cuda_affine.fits(x, table, scale, shift):
                return table.compute(cuda_affine.affine, x, table, scale, shift, *rest)
            if same:
                return table.compute(_scaled, x, scale, shift, *rest)
        return table.compute(_normalized, x, self.norm, *rest)


def _scaled(x, scale, shift, residual, activation):
    return finish(torch.addcmul(shift, x, scale), residual, activation)


def _normalized(x, norm, residual, activation):
    return finish(normalized(x, norm), residual, activation)


def normalized(x, norm):
    """Return a batch norm of a stack, by itself: a new tensor."""
    return F.batch_norm(x, *norm[:4], eps=norm[4])


class AffinePlan(NormPlan):
    """``activation(x * scale + shift + residual)``, by the kernel for that.

    The scale is a tensor, or :class:`~.image_values.Held`; it and the shift may be None. The result
    may be wider than the source.
    """

    is_norm = False

    def __init__(self, source, facts, scale=None, row=None, dtype=None):
        super().__init__(source, facts, "none", source.shape[1], row)
        self.scale, self.shift, self.dtype = scale, None, dtype or source.dtype
        self.slopes = None  # of a PReLU, in place of an activation

    @property
    def is_sum(self):
        """Whether it is the sum of two stacks of its dtype, and nothing else."""
        if self.residual is None or not (self.scale is self.shift is self.slopes is None):
            return False
        return self.activation is None and self.dtype == self.source.dtype == self.residual.dtype

    def takes(self, residual=None, activation=None):
        """Whether a sum or an activation may become part of it."""
        return self.slopes is None and super().takes(residual, activation)

    def takes_slopes(self, weight):
        """Whether a PReLU with such a weight may become part of it."""
        to = casts.for_waiting(self.facts[0])  # to which autocast converts what a PReLU is given
        same = self.dtype == (weight.dtype if to is None else to)
        known = weight.numel() in (1, self.shape[1]) and weight.device == self.source.device
        return same and known and self.takes() and not cuda.records(weight)

    def takes_shift(self, shift):
        """Whether a sum with such a tensor may become part of it: where it has none yet."""
        if not (self.shift is self.residual is self.activation is self.slopes is None):
            return False
        scale = self._scale()
        return scale is None or (scale.dtype, scale.numel()) == (shift.dtype, shift.numel())

    def narrowed(self, dtype):
        """Return the plan of the result in a narrower dtype, or None.

        None for sums, which others read as they are, too: see :meth:`run_both`.
        """
        is_wider = self.dtype == torch.float32 != dtype
        return self.then(dtype=dtype) if is_wider and self.residual is None else None

    def run_both(self, dtype):
        """Compute the result, and that in a narrower dtype: a pair; or return None."""
        if self.dtype != torch.float32 or dtype == torch.float32:
            return None
        trace = self.facts[0].trace
        return self._run(dtype) if trace is None else trace.timed(self.row, self._run, dtype)

    def _scale(self):
        return self.scale.tensor if isinstance(self.scale, Held) else self.scale

    def _run(self, also=None):
        table = self.facts[0]
        rest = self._scale(), self.shift, self.residual, self.activation, self.dtype, also
        rest += (self.slopes,)
        return table.compute(cuda_affine.affine, self.source, table, *rest)


class WiderPlan(Plan):
    """What autocast computes in float32: a convolution that rounds it has it rounded at once.

    ``make(dtype)`` computes it in float32 or in the dtype ``narrow``; it reads the StackTensors
    ``sources``.
    """

    rest = kernel = options = None
    norm, activation, adds_behind = "none", "none", False

    def __init__(self, make, facts, shape, narrow, sources=(), rest=None, row=None):
        self.make, self.facts, self.shape, self.rest = make, facts, shape, rest
        self.narrow, self.dtype, self.sources, self.row = narrow, torch.float32, sources, row
        self.source = self.residual = self.done = None

    @property
    def device(self):
        """The device of the result."""
        return self.facts[0].device

    def narrowed(self, dtype):
        """Return the plan of the result in the narrower dtype, or None."""
        return self.then(dtype=dtype) if dtype == self.narrow != self.dtype else None

    def reads(self, x):
        """Whether a StackTensor, ``x``, is a source."""
        return any(one is x for one in self.sources)

    def run(self):
        """Compute."""
        trace, dtype = self.facts[0].trace, self.dtype
        return self.make(dtype) if trace is None else trace.timed(self.row, self.make, dtype)


def wider(x, make, shape, narrow, sources=(), rest=None, **places):
    """Return the StackTensor of a :class:`WiderPlan` that makes a stack of that of x.

    ``places`` are facts in which it is another: block, size, reach.
    """
    table, block, size, hw, reach = T.facts(x)
    row = None if table.trace is None else table.trace.row
    plan = WiderPlan(make, T.facts(x), shape, narrow, sources, rest, row)
    here = {"block": block, "size": size, "reach": reach} | places
    return T.postpone(table, plan, **here, hw=hw)


class TrainedNorm(TimedPlan):
    """A batch norm in training whose statistics are known: what is left of it, and what follows.

    A sum and an activation become part of it in the mode of gradients that it was called in.
    """

    rest = kernel = options = None
    norm = "trained"

    def __init__(self, source, facts, parameters, statistics, eps, row=None):
        self.source, self.facts, self.parameters = source, facts, parameters
        self.statistics, self.eps, self.row = statistics, eps, row
        self.residual = self.activation = self.done = None
        self.dtype, self.shape = source.dtype, (0, source.shape[1], 0, 0)
        self.records, self.hooks = torch.is_grad_enabled(), saved_tensor_hooks()

    def takes(self, residual=None, activation=None):
        """Whether a sum or an activation may become part of it."""
        if self.records != torch.is_grad_enabled() or self.activation is not None:
            return False
        if residual is not None:
            return self.residual is None
        return activation in (_TRAINED if self.residual is None else ("relu",))

    @property
    def requires_grad(self):
        """Whether the result records gradients."""
        given = (self.source, *self.parameters, self.residual)
        return self.records and any(t is not None and t.requires_grad for t in given)

    def _run(self):
        given = self.source, *self.parameters, self.residual, self.statistics, self.facts[:3]
        hooks = contextlib.nullcontext()
        if saved_tensor_hooks() != self.hooks:  # of a checkpoint that it was not called in
            hooks = torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)
        with hooks:
            return gradients.Norm.apply(*given, self.activation, self.eps)


def _as_it_is(tensor):
    return tensor


class LinearPlan(TimedPlan):
    """A product of the channels, which are the last dimension, with weights that oneDNN laid out.

    ``shape`` is that of the result.
    """

    rest = kernel = options = None

    def __init__(self, source, facts, weight, bias, shape, to=None, row=None):
        self.source, self.facts, self.weight, self.bias = source, facts, weight, bias
        self.norm, self.residual, self.activation, self.done = "none", None, None, None
        self.to, self.shape, self.row = to, shape, row
        self.dtype = casts.after(source.dtype, to)

    def _run(self):
        table = self.facts[0]
        packed = onednn.packed_matrix(self.source, self.weight, table.weights)
        if table.tape is not None and table.tape.holds((self.weight,)):
            table.tape.keep((packed,))
        args = self.source, packed, self.bias, self.residual, self.activation
        return table.compute(onednn.linear, *args)


class MatrixPlan(LinearPlan):
    """A product of the channels, and what follows it, by the kernel of a 1x1 convolution.

    The channels are the last dimension, of the result too until they are ``moved`` to the second.
    """

    moved, scale = False, None

    def takes_scale(self, scale):
        """Whether a product with such a tensor may become part of it: one value a channel, kept."""
        if not isinstance(scale, torch.nn.Parameter):  # others may change before it is computed
            return False
        channels, count = self.weight.shape[0], scale.dim()
        along = (channels, 1, 1) if self.moved else (channels,)
        return (
            self.scale is self.residual is self.activation is None
            and count <= 4
            and tuple(scale.shape) == (1,) * (count - len(along)) + along
            and scale.dtype == self.dtype
            and scale.device == self.device
        )

    def as_image(self):
        """Return the plan with its channels moved to the second dimension."""
        residual = None if self.residual is None else self.residual.permute(0, 3, 1, 2)
        return self.then(moved=True, residual=residual, shape=(0, self.weight.shape[0], 0, 0))

    def _run(self):
        table, block, size, _, _ = self.facts
        given = self.weight, self.bias, self.scale
        weight, bias = made = table.weights.matrix(*given, self.to)
        if table.tape is not None and table.tape.holds(given):
            table.tape.keep(made)
        source = casts.cast(self.source, self.to)
        x, residual = source.permute(0, 3, 1, 2), self.residual
        if residual is not None and not self.moved:
            residual = residual.permute(0, 3, 1, 2)
        one = (1, 1), (0, 0, 0, 0), (1, 1), 1
        y = cuda.conv(x, table, block, size, weight, bias, *one, residual, self.activation)
        if y is None:
            given = (casts.cast(t, self.to) for t in (self.weight, self.bias))
            y = F.linear(source, *given).permute(0, 3, 1, 2)
            y = y if self.scale is None else y * self.scale.view(-1, 1, 1)
            y = finish(y, residual, self.activation)
        return y if self.moved else y.permute(0, 2, 3, 1)


class TransposedPlan(Plan):
    """A transposed convolution and what follows it, where kernels run: its channels are unfolded.

    ``options`` are the keywords of ``ops.conv_transpose``.
    """

    adds_behind = False

    def __init__(self, source, facts, weight, bias, options, to=None, row=None):
        super().__init__(source, facts, weight, bias, options, to, row)
        self.shape = (0, weight.shape[1], 0, 0)
        kernel = tuple(weight.shape[2:])
        sizes = (options[name] for name in ("stride", "padding", "dilation"))
        self.growth = cuda_resize.Growth(kernel, *sizes)

    def run(self):
        """Compute."""
        bare = self.then(residual=None, activation=None) if self.residual is not None else self
        y = bare._by_kernel()
        if y is None:
            return self._by_library()
        return y if bare is self else finish(y, self.residual, self.activation)

    def _by_kernel(self):
        table, block, size, _, _ = self.facts
        given = self.weight, self.bias, self.norm, self.growth, self.to
        source = casts.cast(self.source, self.to)
        call = (source, table, block, size, *table.weights.folded(*given))
        call += (self.options["out_size"], self.activation)
        if table.trace is None:
            return self.growth.grow(*call)
        return table.trace.timed(self.row, self.growth.grow, *call)

    def _by_library(self):
        table, block, size, _, _ = self.facts
        source, (weight, bias) = casts.cast(self.source, self.to), self._folded(table.weights)
        y = ops.conv_transpose(source, table, block, size, weight, bias, **self.options)
        return finish(y, self.residual, self.activation)

    def _folded(self, weights):
        given = self.weight.transpose(0, 1), self.bias, self.norm
        weight, bias = weights.folded(*given, to=self.to)
        return weight.transpose(0, 1), bias
