"""One thread for NumPy's products of few rows, which PyTorch's threads wait for otherwise.

After a product the threads of OpenBLAS keep their processors for a while, and PyTorch's next
operation waits for them. With threadpoolctl, which comes with the extra ``torch``, products at
sites take one thread: they have so few rows that more are no faster.
"""

import contextlib
import functools
import threading
import warnings

_LOCK = threading.Lock()
_users, _before = 0, None  # how many are within, and what the first of them found


@contextlib.contextmanager
def one_blas_thread():
    """Return a context in which OpenBLAS takes one thread.

    How many it takes is a number of the process or of each thread, by its version: all set one, and
    all give back what the first of them found.
    """
    global _users, _before
    openblas = _openblas()
    if openblas is None:
        yield
        return
    with _LOCK:
        limit = openblas.limit(limits=1)
        _before = _before if _users else limit
        mine, _users = _before, _users + 1
    try:
        yield
    finally:
        with _LOCK:
            _users -= 1
            mine.restore_original_limits()


@functools.cache
def _openblas():
    """Return what sets the threads of NumPy's OpenBLAS; None without it, or without the library."""
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of two OpenMPs, which are none of ours
        found = ThreadpoolController().select(internal_api="openblas")
    return found if len(found) else None
