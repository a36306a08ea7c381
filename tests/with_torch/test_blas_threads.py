"""Products at sites take one thread of OpenBLAS beside PyTorch's, and give the rest back."""

import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")
threadpoolctl = pytest.importorskip("threadpoolctl")

import sbnet_cupy.torch as sbt  # noqa: E402
from sbnet_cupy.torch import _blas_threads  # noqa: E402
from sbnet_cupy.torch._blas_threads import one_blas_thread  # noqa: E402


def threads():
    """Return the number of threads of each OpenBLAS of the process."""
    libraries = threadpoolctl.threadpool_info()
    return [found["num_threads"] for found in libraries if found["internal_api"] == "openblas"]


@pytest.fixture
def two_threads():
    """Give OpenBLAS two threads; skip where NumPy has another BLAS."""
    if not threads():
        pytest.skip("NumPy's BLAS is not OpenBLAS")
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        yield threads()


def test_inside_there_is_one(two_threads):
    with one_blas_thread():
        assert set(threads()) == {1}
    assert threads() == two_threads


def test_an_error_gives_them_back(two_threads):
    with pytest.raises(KeyError), one_blas_thread():
        raise KeyError
    assert threads() == two_threads


def test_threads_that_overlap_give_them_back(two_threads):
    entered, leave, seen = threading.Event(), threading.Event(), []

    def hold():
        with threadpoolctl.threadpool_limits(2, user_api="blas"):
            with one_blas_thread():
                seen.append(threads())
                entered.set()
                leave.wait(10)
            seen.append(threads())

    other = threading.Thread(target=hold)
    with one_blas_thread():
        other.start()
        assert entered.wait(10)
    leave.set()
    other.join()
    assert [set(found) for found in seen] == [{1}, {2}]
    assert threads() == two_threads


def test_a_convolution_and_its_gradients_use_it(two_threads, monkeypatch):
    seen = []
    matmul = np.matmul

    def spy(*args, **kwargs):
        seen.append(set(threads()))
        return matmul(*args, **kwargs)

    monkeypatch.setattr(np, "matmul", spy)
    indices = torch.tensor([[0, 1, 1], [0, 1, 2], [0, 3, 3]])
    x = sbt.sparse_tensor(torch.ones(3, 4), indices, spatial_shape=(5, 5))
    w = torch.ones(3, 3, 4, 8, requires_grad=True)
    y = sbt.submanifold_conv(x, w)
    assert seen and all(found == {1} for found in seen)
    forward = len(seen)
    y.features.sum().backward()
    assert len(seen) > forward and all(found == {1} for found in seen)
    assert threads() == two_threads


def test_without_the_library_nothing_changes(two_threads, monkeypatch):
    monkeypatch.setattr(_blas_threads, "_openblas", lambda: None)
    with one_blas_thread():
        assert threads() == two_threads
