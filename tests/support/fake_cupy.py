"""CuPy and ``torch.cuda`` as the benchmarks see them, played by NumPy: a GPU's flow without one.

Calls run where they would be captured, and a replay does nothing. Every event comes 1 ms after the
one before. Waiting for the device during a capture fails, as it would.
"""

import contextlib
import types

import numpy as np


class Clockwork:
    """What all streams share: the time in ms, and whether a capture is under way."""

    now = 0.0
    capturing = False


class Stream:
    ptr = 0

    def __init__(self, non_blocking=True):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def begin_capture(self):
        Clockwork.capturing = True

    def end_capture(self):
        Clockwork.capturing = False
        return types.SimpleNamespace(launch=lambda stream: None)


class Event:
    def __init__(self, enable_timing=False):
        pass

    def record(self, stream):
        Clockwork.now += 1.0
        self.time = Clockwork.now

    def synchronize(self):
        assert not Clockwork.capturing

    def elapsed_time(self, end):
        return end.time - self.time


class TorchGraph:
    def capture_begin(self):
        Clockwork.capturing = True

    def capture_end(self):
        Clockwork.capturing = False

    def replay(self):
        pass


class FakeCupy(types.ModuleType):
    """NumPy under CuPy's name, with what the benchmarks take from ``cupy.cuda``."""

    __version__ = "14.2.0"
    __file__ = None

    def __init__(self):
        super().__init__("cupy")
        properties = {"name": b"NVIDIA H200"}
        runtime = types.SimpleNamespace(
            getDeviceProperties=lambda device: properties,
            runtimeGetVersion=lambda: 13000,
            driverGetVersion=lambda: 13000,
        )
        device = types.SimpleNamespace(
            id=0, synchronize=self.synchronize, use=lambda: None,
            attributes={"L2CacheSize": 1 << 20, "MultiProcessorCount": 4},
        )  # fmt: skip
        self.cuda = types.SimpleNamespace(
            is_available=lambda: True, runtime=runtime, Device=lambda: device, Stream=Stream,
            Event=Event, get_elapsed_time=lambda start, end: start.elapsed_time(end),
        )  # fmt: skip

    def __getattr__(self, name):
        return getattr(np, name)

    @staticmethod
    def synchronize():
        assert not Clockwork.capturing

    @staticmethod
    def RawKernel(source, name, options=()):
        assert f"void {name}(" in source
        return lambda grid, block, arguments: np.copyto(*arguments[1::-1]) if arguments else None

    @staticmethod
    def get_default_memory_pool():
        return types.SimpleNamespace(free_all_blocks=lambda: None)


TORCH_CUDA = {
    "is_available": lambda: True,
    "Stream": Stream,
    "Event": Event,
    "CUDAGraph": TorchGraph,
    "stream": lambda stream: contextlib.nullcontext(),
    "synchronize": FakeCupy.synchronize,
    "empty_cache": lambda: None,
}
