"""Calls of sbnet_cupy.torch on a GPU that is not there: kernels run on the host shim.

Tensors of the CPU say that they are on GPU 0; plans are those of a GPU; a launch takes addresses,
as on a GPU, and runs the kernel that g++ compiled on the memory at these addresses.
"""

import importlib
import math
import sys

import host_cuda
from sbnet_cupy.core import launch as kernels
from sbnet_cupy.core import operator
from sbnet_cupy.core.spec import group_of, spec_of
from support.fused_on_host import BLACKWELL
from support.host_memory import memory_at

STREAM = 7
_FACTS = {
    "sm_count": lambda: BLACKWELL.multiprocessors,
    "shared_bytes": lambda: BLACKWELL.shared_bytes,
    "has_clusters": lambda: True,
    "current_device": lambda: BLACKWELL,
}


class Launch:
    """A kernel with its grid and scalars, as ``core.launch`` prepares it."""

    def __init__(self, gpu, kernel, grid, pointers, scalars, *more):
        self._gpu, self._kernel, self._grid = gpu, kernel, grid
        self._pointers, self._scalars, self._more = pointers, scalars, more

    def __call__(self, *arrays):
        """Launch on NumPy arrays; None is a null pointer."""
        self.on(self._gpu.stream, [0 if a is None else a.ctypes.data for a in arrays])

    def on(self, stream, addresses):
        """Launch on the memory at addresses."""
        assert stream == self._gpu.stream and len(addresses) == self._pointers
        self._gpu.launched.append((self._kernel[1], *addresses))
        block, shared = self._more
        memory = map(memory_at, addresses)
        host_cuda.launch(*self._kernel, self._grid, block, (*memory, *self._scalars), shared)


class Gpu:
    """The GPU: its stream, and what was planned and launched."""

    def __init__(self, torch, patch):
        self.stream, self.capturing, self.planned, self.launched = STREAM, False, [], []
        self.state, self.calling, layers = (
            importlib.import_module(f"sbnet_cupy.torch.{name}")
            for name in ("_dispatch_state", "_call", "layers")
        )

        class OnGpu(torch.Tensor):
            is_cuda = True

            def get_device(self):
                return 0

        self._kind, self._describe, self._native = (
            OnGpu, self.calling.describe, layers.native_weights,
        )  # fmt: skip
        patch.setattr(self.calling, "describe", self._described)
        patch.setattr(layers, "native_weights", self._native_weights)
        patch.setattr(self.state, "thread_is_plain", lambda: True)
        patch.setattr(self.state, "is_plain", lambda value: isinstance(value, torch.Tensor))
        patch.setattr(self.state, "current_device", lambda: 0)
        patch.setattr(self.state, "current_stream", lambda device: self.stream)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        patch.setattr(kernels, "prepare", self._prepare)
        patch.setattr(operator, "_PLANS", operator._Plans())
        for name in [name for name in sys.modules if name.startswith("sbnet_cupy.block_sparse")]:
            for fact in _FACTS.keys() & vars(sys.modules[name]).keys():
                patch.setattr(sys.modules[name], fact, _FACTS[fact])

    def _native_weights(self, weights):
        """Return weights as native arrays: NumPy's, whose specs say that they are on a GPU."""
        made = self._native(weights)
        if made is None:
            return None
        specs = (None if a is None else spec_of(a)._replace(device=0) for a in made._given())
        made.specs = group_of(tuple(specs))
        return made

    def _described(self, tensors, is_plain=None, packed=None):
        """Describe tensors as those of a GPU: also gradients, which autograd makes plain ones."""
        on_gpu = (t.as_subclass(self._kind) if hasattr(t, "as_subclass") else t for t in tensors)
        found = self._describe(on_gpu, is_plain, packed)
        learns = any(getattr(t, "requires_grad", False) for t in tensors)  # of a view: by the mode
        return found and found._replace(requires_grad=learns)

    def _prepare(self, stem, kernel, template, grid, block, pointers, scalars, shared=0,
                 persistent=False, dependent=False, cluster=1):  # fmt: skip
        assert cluster == 1 or kernel == "reduce_mask"  # see kernels_on_host.py
        self.planned.append(kernel)
        if persistent:  # few thread blocks, so that they take several turns
            grid = grid if isinstance(grid, tuple) else (grid,)
            grid = (min(grid[0], max(8 // math.prod(grid[1:]), 1)), *grid[1:])
        return Launch(self, (stem, kernel, template), grid, pointers, scalars, block, shared)

    def tensor(self, tensor, skip=0):
        """Return a copy of a tensor on this GPU, some elements off an aligned address."""
        memory = tensor.new_empty(tensor.numel() + skip)[skip:].view(tensor.shape)
        return memory.copy_(tensor).as_subclass(self._kind)

    @staticmethod
    def compute(function, tensors):
        """Call a function of native arrays: here of NumPy's, as ``_native.compute`` of CuPy's."""
        return function(*(None if t is None else t.detach().contiguous().numpy() for t in tensors))

    def kernels(self):
        """Return the names of the kernels that were launched since the last time."""
        names = [name for name, *_ in self.launched]
        self.launched.clear()
        return names
