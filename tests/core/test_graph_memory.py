"""Memory of a capture is kept: the rule of core/graph_memory.py, on a stand-in for CuPy's pools."""

import contextlib
import types

import numpy as np
import pytest

from sbnet_cupy.core import graph_memory


class Borrowed:
    """Stands for cupy.cuda.UnownedMemory."""


@pytest.fixture
def device(monkeypatch):
    """A namespace that allocates what it is told, and whose stream captures or not."""
    state = types.SimpleNamespace(capturing=True, owner=object(), current=None)

    def allocate(size):
        return types.SimpleNamespace(mem=state.owner, size=size)

    @contextlib.contextmanager
    def using_allocator(allocator):
        before, state.current = state.current, allocator
        yield
        state.current = before

    state.current = allocate
    cuda = types.SimpleNamespace(
        UnownedMemory=Borrowed,
        get_allocator=lambda: state.current,
        using_allocator=using_allocator,
        get_current_stream=lambda: types.SimpleNamespace(ptr=1),
        runtime=types.SimpleNamespace(streamIsCapturing=lambda stream: state.capturing),
    )
    monkeypatch.setattr(graph_memory, "namespace", lambda array: types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(graph_memory, "_KEPT", [])
    return state


def test_what_a_capture_allocates_is_kept(device):
    with graph_memory.memory_of_graphs(None):
        memory = device.current(512)
    assert memory.size == 512 and [memory] == graph_memory._KEPT
    device.current(64)
    assert [memory] == graph_memory._KEPT


def test_nothing_is_kept_without_a_capture(device):
    device.capturing = False
    with graph_memory.memory_of_graphs(None):
        memory = device.current(512)
    graph_memory.keep_if_capturing(types.SimpleNamespace(data=memory))
    assert graph_memory._KEPT == []


def test_a_frameworks_memory_is_its_own(device):
    device.owner = Borrowed()
    with graph_memory.memory_of_graphs(None):
        memory = device.current(512)
    graph_memory.keep_if_capturing(types.SimpleNamespace(data=memory))
    assert graph_memory._KEPT == []


def test_numpy_captures_nothing():
    assert not graph_memory.is_capturing(np.zeros(1))
