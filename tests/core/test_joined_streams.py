"""Which launches may overlap the kernel ahead: not the first ones after streams have met."""

import ctypes
import sys
from types import SimpleNamespace

import pytest

from sbnet_cupy.core import launch as kernels

FIRST, OTHER = 0x1000, 0x2000  # addresses of streams


@pytest.fixture
def launched(monkeypatch):
    """Return a launch of a dependent kernel without a GPU, and what the driver is asked for."""
    asked = []

    def enqueue(config, kernel, parameters, extra):
        config = ctypes.cast(config, ctypes.POINTER(kernels._LaunchConfig)).contents
        attributes = {a.id: a.value[0] for a in config.attributes[: config.attribute_count]}
        asked.append((config.stream, *attributes.values()))
        return 0

    runtime = SimpleNamespace(getDevice=lambda: 0, setDevice=None)
    driver = SimpleNamespace(CUDADriverError=RuntimeError)
    cuda = SimpleNamespace(runtime=runtime, driver=driver, get_current_stream=None)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(kernels, "driver", lambda: SimpleNamespace(cuLaunchKernelEx=enqueue))
    monkeypatch.setattr(kernels, "_JOINED", set())
    function = SimpleNamespace(kernel=SimpleNamespace(ptr=1))

    def prepared(dependent=True, cluster=1):
        options = function, 256, 0, 1, "q", 0, dependent, cluster
        return kernels._Launch(kernels._ExtendedParameters(*options), (4, 1, 1), (7,))

    return prepared, asked


def test_the_first_launch_after_a_join_waits(launched):
    prepared, asked = launched
    one, two = prepared(), prepared()
    one.on(FIRST, [8])
    kernels.joined(FIRST)
    two.on(OTHER, [8])
    two.on(FIRST, [8])
    two.on(FIRST, [8])
    one.on(FIRST, [8])
    assert asked == [(FIRST, 1), (OTHER, 1), (FIRST, 0), (FIRST, 1), (FIRST, 1)]


def test_clusters_keep_their_size(launched):
    prepared, asked = launched
    dependent, plain = prepared(cluster=4), prepared(dependent=False, cluster=4)
    for _ in range(2):
        kernels.joined(FIRST)
        plain.on(FIRST, [8])
        dependent.on(FIRST, [8])
    dependent.on(FIRST, [8])
    assert asked == 2 * [(FIRST, 4), (FIRST, 4, 0)] + [(FIRST, 4, 1)]
