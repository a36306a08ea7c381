"""The libraries whose arrays the table of output_hashes goes through: how each is called."""

import importlib

import numpy as np

import sbnet_cupy as sb


class Missing(Exception):
    """The library or its device is not there."""


def _import(name):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Missing(str(error)) from error


class Numpy:
    """The package's own functions on NumPy arrays."""

    ops = sb
    writes = True  # takes out=
    needs_capacity = False
    dtypes = None  # all

    def array(self, array):
        return np.array(array, order="C")

    def to_numpy(self, array):
        return np.asarray(array)

    def run(self, function, *arrays):
        return function(*arrays)

    def takes(self, call, options):
        """Whether a call of the table is for this library."""
        return call.core and "gradient" not in options


class Cupy(Numpy):
    """The same on CuPy arrays."""

    def __init__(self):
        self.cupy = _import("cupy")
        if not self.cupy.cuda.is_available():
            raise Missing("no CUDA device")

    def array(self, array):
        return self.cupy.asarray(np.array(array, order="C"))

    def to_numpy(self, array):
        return array.get() if isinstance(array, self.cupy.ndarray) else np.asarray(array)


class _Framework(Numpy):
    """An adapter; gradients come from the framework."""

    def takes(self, call, options):
        name = str(options.get("dtype", "float32"))
        return call.adapters and (self.dtypes is None or name in self.dtypes)


class Torch(_Framework):
    """Tensors through sbnet_cupy.torch."""

    dtypes = ("bool", "uint8", "int32", "float16", "bfloat16", "float32", "float64")

    def __init__(self, device="cpu"):
        self.torch = _import("torch")
        if device == "cuda" and not self.torch.cuda.is_available():
            raise Missing("no CUDA device")
        if device == "cuda":
            _import("cupy")
        self.torch.set_num_threads(1)
        self.ops = _import("sbnet_cupy.torch")
        self.device = device

    def takes(self, call, options):
        return call.modules or super().takes(call, options)

    def array(self, array):
        array = np.array(array, order="C")
        if array.dtype.name == "bfloat16":
            tensor = self.torch.from_numpy(array.view(np.int16)).view(self.torch.bfloat16)
        else:
            tensor = self.torch.from_numpy(array)
        return tensor.to(self.device)

    def to_numpy(self, tensor):
        if not isinstance(tensor, self.torch.Tensor):
            return np.asarray(tensor)
        tensor = tensor.detach().cpu().contiguous()
        if tensor.dtype == self.torch.bfloat16:
            tensor = tensor.view(self.torch.int16)
        return tensor.numpy()

    def gradient(self, function, grad, *arrays):
        arrays = [array.requires_grad_() for array in arrays]
        y = function(*arrays)
        return y, self.torch.autograd.grad(y, arrays, grad)


class TorchCuda(Torch):
    def __init__(self):
        super().__init__("cuda")


class Jax(_Framework):
    """Arrays through sbnet_cupy.jax, jitted."""

    writes = False
    needs_capacity = True
    dtypes = ("bool", "uint8", "int32", "float16", "bfloat16", "float32")

    def __init__(self):
        self.jax = _import("jax")
        self.ops = _import("sbnet_cupy.jax")

    def array(self, array):
        return self.jax.numpy.asarray(np.array(array, order="C"))

    def run(self, function, *arrays):
        return self.jax.jit(function)(*arrays)

    def gradient(self, function, grad, *arrays):
        def both(grad, *arrays):
            y, pull = self.jax.vjp(function, *arrays)
            return y, pull(grad)

        return self.jax.jit(both)(grad, *arrays)


class TensorFlow(_Framework):
    """Tensors through sbnet_cupy.tensorflow, inside tf.function."""

    writes = False
    dtypes = ("bool", "uint8", "int32", "float16", "bfloat16", "float32", "float64")

    def __init__(self):
        self.tf = _import("tensorflow")
        self.tf.get_logger().setLevel("ERROR")
        self.tf.config.set_visible_devices([], "GPU")
        self.tf.config.threading.set_intra_op_parallelism_threads(1)
        self.ops = _import("sbnet_cupy.tensorflow")

    def array(self, array):
        return self.tf.constant(np.array(array, order="C"))

    def run(self, function, *arrays):
        return self.tf.function(function, autograph=False)(*arrays)

    def gradient(self, function, grad, *arrays):
        def both(grad, *arrays):
            with self.tf.GradientTape() as tape:
                tape.watch(arrays)
                y = function(*arrays)
            return y, tape.gradient(y, arrays, grad)

        return self.tf.function(both, autograph=False)(grad, *arrays)


LIBRARIES = {
    "numpy": Numpy,
    "cupy": Cupy,
    "torch": Torch,
    "torch-cuda": TorchCuda,
    "jax": Jax,
    "tensorflow": TensorFlow,
}
