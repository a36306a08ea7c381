"""Functions of eager tensors that the package computes, made differentiable once."""

import tensorflow as tf

from ..errors import DTypeError
from ._tensors import tensor_of


def eager(name, value):
    """Return an argument as an eager tensor, or None; raise for anything else."""
    value = tensor_of(name, value)
    if not tf.executing_eagerly():
        raise DTypeError(
            f"{name} must be an eager tensor, since the number of sites is data; call this outside "
            "of tf.function"
        )
    return value


def differentiable(forward, backward, given, by_result=False):
    """Return ``forward(**given)``, which is differentiated by ``backward(grad, **given)``.

    ``backward`` returns the gradients of what is given, in its order; None is not given. With
    ``by_result`` it takes the result, too, as ``y``.
    """
    given = {name: eager(name, value) for name, value in given.items() if value is not None}

    @tf.custom_gradient
    def compute(*tensors):
        named = dict(zip(given, tensors, strict=True))
        y = forward(**named)
        more = {"y": y} if by_result else {}

        @tf.custom_gradient
        def differentiate(grad, *_):
            _check_eager(grad)
            return backward(grad, **named, **more), _twice

        return y, lambda grad: differentiate(grad, *tensors)

    return compute(*given.values())


def _check_eager(grad):
    """Raise where a gradient is recorded in a graph."""
    if not hasattr(grad, "_numpy"):
        raise DTypeError(
            "gradients of functions at sites must be computed eagerly, got a "
            f"{type(grad).__name__}; call tape.gradient outside of tf.function, and tape.jacobian "
            "with experimental_use_pfor=False"
        )


def _twice(*_):
    raise NotImplementedError(
        "functions of sbnet_cupy.tensorflow at sites are differentiable once; use "
        "sbnet_cupy.torch or sbnet_cupy.jax for more"
    )
