"""Operation: an operation of the core as a function of tensors, made from its declaration.

The core's :class:`~sbnet_cupy.core.operator.Operator` names the arrays and options of an operation,
and has its checks, shape rules, plans and, where it is linear, its gradient.
"""

import tensorflow as tf

from ..block_sparse.grid import resolve_grid
from ..core.arrays import array_function
from ._tensors import known_spec, run, spec_of, tensor_of

_STACKS = ("blocks", "active_block_indices")  # arrays with a row for each block


class Operation:
    """A function of tensors made from an operator of the core that has one result.

    Parameters
    ----------
    operator : Operator
        The declaration.
    gradient : function
        Of tensors, options, the gradient of the result and the wanted names: returns ``{name:
        gradient}``.
    prefixes : dict
        Words before the names of some arrays in errors.
    """

    def __init__(self, operator, *, gradient, prefixes=None):
        self.operator, self.gradient = operator, gradient
        self.names = [(prefixes or {}).get(name, "") + name for name in operator.arrays]

    def __call__(self, tensors, options):
        """Check a call as far as sizes are known, and compute it now or when the graph runs."""
        tensors = self.read(tensors)
        return self.compute(tensors, options, self.infer(tensors, options)[1])

    def read(self, tensors):
        """Return variables as tensors; raise for what is neither."""
        return tuple(map(tensor_of, self.names, tensors))

    def infer(self, tensors, options):
        """Check a call; return the specs of its tensors, and the static shape of its result.

        Of a batch or a stack the number may be unknown: any will do for the checks. If other sizes
        are unknown, all is checked when the graph runs, and there are no specs. Layers, which
        TensorFlow computes with no further checks, raise.
        """
        named = dict(zip(self.operator.arrays, tensors, strict=True))
        from_images = not {"blocks", "base"} & set(named)  # to blocks
        first = named["active_block_indices" if from_images else "x"]
        counts = [self._count(named, name in _STACKS) for name in named]
        if self.operator.options[0] == "bsize":
            specs = list(map(spec_of, tensors, counts))
        else:  # of a layer
            specs = list(map(known_spec, self.names, tensors, counts))
        if any(s is None and t is not None for s, t in zip(specs, tensors, strict=True)):
            resolve_grid(*options[:3])
            return None, (None,) * 4 if from_images else first.shape
        result = self.operator.infer(specs, options)[0]
        return specs, (first.shape[0], *result.shape[1:])

    def _count(self, named, of_blocks):
        """Return the number of images, or of blocks, as one of the tensors tells it, or 1."""
        names = _STACKS if of_blocks else ("x", "base")
        shapes = [named[name].shape for name in names if named.get(name) is not None]
        told = [shape[0] for shape in shapes if shape.rank]
        return next((count for count in told if count is not None), 1)

    def compute(self, tensors, options, shape):
        """Compute a call that was checked, with its gradient."""
        names = self.operator.arrays
        given = [i for i, tensor in enumerate(tensors) if tensor is not None]
        floats = [i for i in given if tensors[i].dtype.is_floating or tensors[i].dtype.is_complex]

        def whole(parts, places):
            """Return all arrays of the call, some of them replaced."""
            found = list(tensors)
            for place, part in zip(places, parts, strict=True):
                found[place] = part
            return found

        @array_function
        def core(*arrays):
            return self.operator(whole(arrays, given), options)

        @tf.custom_gradient
        def differentiable(*parts):
            called = whole(parts, floats)
            y = run(core, [called[i] for i in given], tensors[0].dtype, shape)

            def backward(grad):
                wanted = {names[i] for i in floats}
                found = self.gradient(called, options, grad, wanted)
                return [found[names[i]] for i in floats]

            return y, backward

        if not floats:
            return run(core, [tensors[i] for i in given], tensors[0].dtype, shape)
        return differentiable(*(tensors[i] for i in floats))
