"""Tensors, eager or symbolic: what they must be, and how our functions run on them."""

import numpy as np

try:
    import tensorflow as tf
except ImportError as error:
    raise ImportError(
        "sbnet_cupy.tensorflow needs TensorFlow; pip install 'sbnet-cupy[tensorflow]'"
    ) from error

from ..block_sparse.active_blocks import ActiveBlocks
from ..block_sparse.bottleneck.weights import BottleneckWeights
from ..core.arrays import library_of
from ..core.spec import ArraySpec
from ..errors import DeviceError, DTypeError, ShapeError

_OLDEST = (2, 18)
if tuple(map(int, tf.__version__.split(".")[:2])) < _OLDEST:
    raise ImportError(
        f"sbnet_cupy.tensorflow needs TensorFlow 2.18 or newer, got {tf.__version__}; "
        "pip install -U 'tensorflow-cpu>=2.18'"
    )


def tensor_of(name, value):
    """Return an argument as a tensor: a variable is read, None stays, anything else raises."""
    if value is None:
        return None
    if isinstance(value, tf.Variable):
        return value.read_value()
    if tf.is_tensor(value) and isinstance(value, tf.Tensor):
        return value
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        call = "to_tensor()" if isinstance(value, tf.RaggedTensor) else "tf.sparse.to_dense"
        raise DTypeError(f"{name} must be dense, got a {type(value).__name__}; use {call}")
    if tf.is_tensor(value):  # a variable of Keras: in the dtype that its layer computes in
        return tf.convert_to_tensor(value)
    if library_of(value) is None:
        convert = "use tf.convert_to_tensor, or wrap the call in a layer for symbolic inputs"
        instead = getattr(type(value), "instead", convert)
        raise DTypeError(
            f"{name} must be a TensorFlow tensor, got {type(value).__name__}; {instead}"
        )
    raise DeviceError(
        f"{name} must be a TensorFlow tensor, got an array of {library_of(value).name}; convert it "
        "with tf.convert_to_tensor"
    )


def spec_of(tensor, count=1):
    """Return the spec of a tensor, or None where too little is known of its shape.

    The number of images or blocks need not be known: it is ``count`` then.
    """
    if tensor is None or tensor.shape.rank is None:
        return None
    shape = tensor.shape.as_list()
    if len(shape) > 1 and shape[0] is None:
        shape[0] = count
    dtype = np.dtype(tensor.dtype.as_numpy_dtype)
    return None if None in shape else ArraySpec(tuple(shape), dtype)


def known_spec(name, tensor, count=1, what="known sizes"):
    """Return the spec of a tensor, None for None; raise where too little is known of its shape."""
    spec = spec_of(tensor, count)
    if spec is None and tensor is not None:
        raise ShapeError(
            f"{name} must have {what} inside tf.function, got {tensor.shape}; call set_shape first"
        )
    return spec


def run(function, values, dtypes, shapes):
    """Call a function of the package on tensors, now or when the graph runs.

    ``dtypes`` and ``shapes`` (static, None where a size is not known) are those of its results, a
    list of them or one.
    """
    if tf.executing_eagerly():
        return function(*values)
    results = tf.numpy_function(function, values, dtypes)
    if not isinstance(dtypes, list):
        return tf.ensure_shape(results, shapes)
    return [tf.ensure_shape(result, shape) for result, shape in zip(results, shapes, strict=True)]


def as_it_is(function):
    """Return a function that AutoGraph does not rewrite, nor what it calls: it takes seconds."""
    return tf.autograph.experimental.do_not_convert(function)


def _make_nested(kind):
    """Let TensorFlow look inside a class that holds arrays, and build it again."""

    def flatten(self):
        grid = getattr(self, "grid", None)
        return grid, self._arrays()

    def unflatten(cls, grid, arrays):
        return cls(*arrays) if grid is None else cls(*arrays, grid)

    kind.__tf_flatten__ = flatten
    kind.__tf_unflatten__ = classmethod(unflatten)


for _kind in (ShapeError, DTypeError, DeviceError):  # or tf.function makes a StagingError of them
    _kind.__init__ = Exception.__init__

_make_nested(ActiveBlocks)
_make_nested(BottleneckWeights)
