"""The array libraries that come through the DLPack door: how the tests make and inspect theirs."""

import ctypes

import ml_dtypes
import numpy as np


class Torch:
    """PyTorch tensors; they may be written, so ``out=`` takes them."""

    name = "torch"

    def __init__(self, module, device="cpu", native=np):
        self.module, self.device, self.native = module, device, native

    def make(self, array):
        array = np.array(array, order="C")
        if array.dtype == ml_dtypes.bfloat16:
            tensor = self.module.from_numpy(array.view(np.int16)).view(self.module.bfloat16)
        else:
            tensor = self.module.from_numpy(array)
        return tensor.to(self.device)

    def address(self, tensor):
        return tensor.data_ptr()


class Jax:
    """JAX arrays; never written."""

    name = "jax"

    def __init__(self, module, device="cpu", native=np):
        self.module, self.native = module, native
        self.device = module.devices(device)[0]

    def make(self, array):
        return self.module.device_put(np.array(array, order="C"), self.device)

    def address(self, array):
        return array.unsafe_buffer_pointer()


class TensorFlow:
    """Eager TensorFlow tensors; never written."""

    name = "tensorflow"

    def __init__(self, module, device="cpu", native=np):
        self.module, self.native = module, native

    def make(self, array):
        return self.module.constant(np.array(array, order="C"))

    def address(self, tensor):
        """Read the pointer that its DLPack capsule holds: the first field of a DLTensor."""
        capsule = self.module.experimental.dlpack.to_dlpack(tensor)
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        return ctypes.c_void_p.from_address(pointer(capsule, b"dltensor")).value


FRAMEWORKS = {"torch": Torch, "jax": Jax, "tensorflow": TensorFlow}
