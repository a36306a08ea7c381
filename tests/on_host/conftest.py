"""Kernels on the shim: all of these tests need g++."""

import pytest

from support.stack_as_on_gpu import send_to_shim


@pytest.fixture(scope="module", autouse=True)
def _compiler(require):
    require("g++")


@pytest.fixture(params=[pytest.param(84, marks=pytest.mark.exhaustive), 1], ids=["large", "tiny"])
def on_shim(request, monkeypatch):
    """Send launches of stack functions to the shim, as on a GPU of many multiprocessors or one."""
    memory, launched = send_to_shim(monkeypatch, request.param)
    yield launched
    memory.check()
