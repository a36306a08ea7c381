"""Weights as convolutions on a stack take them: batch norm folded in, channels_last, kept."""

import functools
import math
import sys

import torch

from .._dispatch_state import is_mapped
from . import casts
from .layout import channels_last

_COUNTER = "num_batches_tracked"  # the buffer of a batch norm that a batch in training adds 1 to

_SHARDED = "FSDPModule", "FullyShardedDataParallel"  # of torch.distributed.fsdp


class Weights:
    """What was made of a network's weights, kept while it is evaluated.

    A change shows in the memory of a tensor or its autograd version. Not all that trains weights
    shows there, so a call that records gradients, ``train()`` and ``eval()`` drop everything, and
    :meth:`follow` does where the network was trained by itself.
    What is made of tensors that a call has made itself, such as a parametrized bias, is not kept.
    With ``keeps=False`` nothing is: in a trace, where tensors have no memory.
    """

    def __init__(self, keeps=True):
        self.keeps, self.kept = keeps, {}
        self.buffers, self.seen = frozenset(), None  # of the network, at its last call

    def __reduce__(self):
        return type(self), (self.keeps,)  # copies keep nothing

    def copied(self):
        """Return a copy for calls of which nothing is to be kept here, nor beside a weight."""
        twin = Weights(self.keeps)
        twin.buffers, twin.seen = self.buffers, self.seen
        for key, (state, held, (first, *others)) in self.kept.items():
            alike = first.detach()
            vars(alike).update(vars(first))  # what is kept beside it so far
            twin.kept[key] = state, held, (alike, *others)
        return twin

    def clear(self):
        """Forget everything."""
        self.kept.clear()  # in place: what a graph was made of stays the same object

    def follow(self, model):
        """Take the parameters and buffers of a network that is called now.

        Forget everything if they are others than at the last call: what was made of the others
        would be kept, too. Forget it as well if its batch norms have counted batches since. What
        trains by itself, as the network outside of ``sparsify``, writes to their statistics past
        autograd's versions.
        """
        buffers, parameters, counters = [], [], []
        for module in model.modules():  # faster than buffers() and parameters()
            buffers += module._buffers.values()
            parameters += module._parameters.values()
            if _COUNTER in module._buffers:
                counters.append(module._buffers[_COUNTER])
        counts = [t._version for t in counters if t is not None and not t.is_inference()]
        self.buffers = frozenset(map(id, buffers))
        seen = counts, self.buffers, frozenset(map(id, parameters))
        if seen != self.seen:
            self.clear()
            self.seen = seen

    def folded(self, weight, bias, norm, growth=None, to=None):
        """Return (weight, bias) with a batch norm in them; ``norm`` is None or its five values.

        They are of their own dtype, or of that to which autocast converts.

        With ``s = gamma / sqrt(var + eps)``: ``weight * s`` and ``(bias - mean) * s + beta``, made
        in float32 for tensors of half precision. With a ``growth`` they are those of a transposed
        convolution, as the convolution that it is takes them.
        """
        tensors = [weight, bias, *(norm[:4] if norm else ())]
        key = (tuple(map(id, tensors)), norm and norm[4], growth and growth.key, to)
        return self._kept(weight, key, tensors, lambda: _made(weight, bias, norm, growth, to))

    def affine(self, norm):
        """Return (shift, scale), ``[C, 1, 1]`` each, of a batch norm of its own."""
        key = (*map(id, norm[:4]), norm[4])
        return self._kept(norm[2], key, norm[:4], lambda: _affine(norm))

    def behind(self, last, count):
        """Return ``[2, C']``, by what channels are scaled, and shifted then: float32 mostly.

        ``last`` is a batch norm, or a scale and a shift that are one parameter each, or None, with
        one value for all channels or one for each. C' are the ``last_channels`` of ``count``.
        """
        tensors = last[:4] if len(last) == 5 else last
        key = ("behind", *map(id, tensors), *last[4:], count)
        first = tensors[2] if len(last) == 5 else tensors[0]
        return self._kept(first, key, tensors, lambda: (_behind(last, count),))[0]

    def unit(self, norm, layers):
        """Return the arrays of a BottleneckWeights: of a norm, and of three convolutions and norms.

        A norm has its five values; a layer has a weight, a bias and the norm after it, or None.
        """
        given = [(one.weight, one.bias, one.norm) for one in layers]
        tensors = [*norm[:4], *(t for w, b, n in given for t in (w, b, *(n or ())[:4]))]
        epsilons, to = (norm[4], *(n and n[4] for _, _, n in given)), layers[0].to
        key = ("unit", *map(id, tensors), *epsilons, to)
        return self._kept(layers[0].weight, key, tensors, lambda: _unit(norm, given, to))

    def packed(self, weight, make):
        """Return the matrix of a linear layer as ``make()`` lays it out."""
        return self._kept(weight, (id(weight), "linear"), (weight,), lambda: (make(),))[0]

    def slopes(self, parameter, count, to=None):
        """Return the weight of a PReLU, as autocast converts it, as float32 for each channel."""
        key = ("slopes", id(parameter), count, to)
        return self._kept(parameter, key, (parameter,), lambda: (_slopes(parameter, count, to),))[0]

    def of_channels(self, parameter, count):
        """Return a value for each channel of a parameter that has one for all."""
        key = ("channels", id(parameter), count)
        made = self._kept(parameter, key, (parameter,), lambda: (_repeated(parameter, count),))
        return made[0]

    def cast(self, parameter, to):
        """Return a parameter, or None, as autocast converts it."""
        if parameter is None or casts.after(parameter.dtype, to) == parameter.dtype:
            return parameter
        key = ("cast", id(parameter), to)
        make = functools.partial(casts.cast, parameter.detach(), to)
        return self._kept(parameter, key, (parameter,), lambda: (make(),))[0]

    def matrix(self, weight, bias, scale, to=None):
        """Return (weight, bias) of a linear layer as a 1x1 convolution's, with a scale or None.

        The scale of each result is noted on the weight, whose numbers it may be too small for; the
        bias is multiplied by it, in float32.
        """
        tensors = (weight, bias, scale)
        key = ("matrix", *map(id, tensors), to)
        return self._kept(weight, key, tensors, lambda: _matrix(*tensors, to))

    def _kept(self, parameter, key, tensors, make):
        """Return what ``make()`` made of such tensors; the first of its results may be marked."""
        if not self.keeps or not isinstance(parameter, torch.nn.Parameter):
            return make()
        tensors = [t for t in tensors if t is not None]
        return self.made(key, tensors, make) if all(map(self._stays, tensors)) else make()

    def _stays(self, tensor):
        """Whether a tensor is the network's own, and not of this call alone."""
        own = id(tensor) in self.buffers or isinstance(tensor, torch.nn.Parameter)
        return own and not is_mapped(tensor)

    def made(self, key, tensors, make):
        """Return what ``make()`` made of tensors that look the same; its first part is marked."""
        if any(t.is_inference() for t in tensors):  # those have no version
            return make()
        state = [(t.data_ptr(), t._version) for t in tensors]
        found = self.kept.get(key)
        if found is None or found[0] != state:
            held = [t.detach() for t in tensors]  # keeps the memory taken, and the tensors alive
            found = state, (held, tensors), make()
            found[2][0].is_kept = True  # what is made of it may be kept beside it
            self.kept[key] = found
        return found[2]


def is_sharded(model):
    """Whether a part of a network is sharded by FSDP, which frees its weights once it has run.

    Its weights are no longer there for what waits, and no version tells that others were gathered.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: nothing is
    if fsdp is None or not torch.distributed.is_initialized():
        return False
    kinds = tuple(getattr(fsdp, name) for name in _SHARDED if hasattr(fsdp, name))
    return any(isinstance(module, kinds) for module in model.modules())


def _slopes(parameter, count, to):
    return _repeated(casts.cast(parameter, to).float(), count)


def _repeated(parameter, count):
    values = parameter.detach().flatten().expand(count)
    return values.clone(memory_format=torch.contiguous_format)  # at an aligned address


def _behind(last, count):
    from ...block_sparse.stack.stack_conv_plan import last_channels

    with torch.no_grad():
        pair = scale_and_shift(last) if len(last) == 5 else last
        pair = [None if t is None else _wide(t) for t in pair]
        like = next(t for t in pair if t is not None)
        table = like.new_zeros(2, last_channels(count))
        table[0, :count] = 1
        for row, values in zip(table, pair, strict=True):
            if values is not None:
                row[:count] = values.flatten()
        return table


def _matrix(weight, bias, scale, to):
    with torch.no_grad():
        weight, bias = casts.cast(weight.detach()[:, :, None, None], to), casts.cast(bias, to)
        if scale is not None:
            weight._stack_scale = scale = _wide(scale).flatten()
            bias = None if bias is None else _wide(bias) * scale
        return weight, None if bias is None else bias.detach()


def _unit(norm, layers, to):
    with torch.no_grad():
        kernels = [casts.cast(weight.detach(), to) for weight, _, _ in layers]
        kernels = [weight.permute(2, 3, 1, 0).contiguous() for weight in kernels]
        tables = [scale_and_shift(norm)]
        tables += [scale_and_shift(after, bias) for _, bias, after in layers[:2]]
        return *kernels, *(t.contiguous() for pair in tables for t in pair)


def _made(weight, bias, norm, growth, to):
    if growth is None:
        return fold(weight, bias, norm, to)
    weight, bias = fold(weight.transpose(0, 1), bias, norm, to)
    return growth.weights(weight), None if bias is None else bias.repeat(math.prod(growth.stride))


def fold(weight, bias, norm, to=None):
    """Return (weight, bias) with a batch norm folded in, channels_last, as autocast converts."""
    with torch.no_grad():
        dtype = casts.after(weight.dtype, to)
        if norm is not None:
            scale, shift = scale_and_shift(norm, bias)
            bias = shift.to(dtype)
            weight = (_wide(weight) * scale[:, None, None, None]).to(dtype)
        weight, bias = channels_last(casts.cast(weight.detach(), to)), casts.cast(bias, to)
        return weight, None if bias is None else bias.detach()


def scale_and_shift(norm, bias=None):
    """Return a batch norm of ``x + bias`` as ``x * scale + shift``."""
    mean, variance, gamma, beta, eps = (
        t if t is None or isinstance(t, float) else _wide(t) for t in norm
    )
    scale = torch.rsqrt(variance + eps)
    scale = scale if gamma is None else scale * gamma
    shift = -mean if bias is None else _wide(bias) - mean
    shift = shift * scale
    return scale, shift if beta is None else shift + beta


def _affine(norm):
    with torch.no_grad():
        scale, shift = scale_and_shift(norm)
        return shift[:, None, None], scale[:, None, None]


def _wide(tensor):
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
