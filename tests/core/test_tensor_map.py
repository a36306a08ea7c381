"""Descriptions of arrays for the GPU's copy engine, with a driver that only listens."""

import ctypes

import pytest

from sbnet_cupy.core import tensor_map
from sbnet_cupy.core.tensor_map import TensorMap, encode

ROWS = TensorMap(2, 2, (192, 1000, 1), (384, 384), (64, 64, 1))


class Driver:
    """Keeps what it is asked for, and answers with a status."""

    def __init__(self, status=0):
        self.status, self.calls = status, []

    def cuTensorMapEncodeTiled(self, made, *arguments):
        """Write a mark to the description."""
        made[0] = b"m"
        self.calls.append((ctypes.addressof(made), ctypes.sizeof(made), arguments))
        return self.status


@pytest.fixture
def driver(monkeypatch):
    listening = Driver()
    monkeypatch.setattr(tensor_map, "driver", lambda: listening)
    encode.cache_clear()
    yield listening
    encode.cache_clear()


def test_the_driver_is_told_sizes_strides_and_box(driver):
    assert encode(ROWS, 4096)[0] == b"m"
    ((address, size, arguments),) = driver.calls
    kind, axes, array, sizes, strides, box, steps, *how = arguments
    assert (address % 64, size) == (0, 128)
    assert (kind, axes, array.value) == (1, 3, 4096)
    assert [list(a) for a in (sizes, strides, box, steps)] == [
        [192, 1000, 1], [384, 384], [64, 64, 1], [1, 1, 1]
    ]  # fmt: skip
    assert how == [0, 3, 3, 0]
    encode(ROWS._replace(itemsize=4), 4096)
    assert driver.calls[1][2][0] == 2


def test_an_array_is_described_once(driver):
    assert encode(ROWS, 4096) is encode(ROWS, 4096)
    assert encode(ROWS, 8192) is not encode(ROWS, 4096)
    assert len(driver.calls) == 2


def test_what_the_driver_refuses_raises(driver):
    driver.status = 1
    with pytest.raises(RuntimeError, match=r"CUresult 1: TensorMap\(array=2"):
        encode(ROWS, 4097)
