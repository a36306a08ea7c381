"""The code for cuDNN on NumPy arrays, against a front end that reads their pointers."""

import contextlib
import sys
from unittest import mock

from sbnet_cupy.dense import cudnn as dense_cudnn
from support.fake_cuda_libraries import Cudnn


@contextlib.contextmanager
def fake_cudnn(supports=lambda graph: True):
    """Run the code for cuDNN on NumPy arrays, against a front end that reads their pointers."""
    cudnn = Cudnn(supports)
    names = ("_graph", "_handle", "_kernel_cache", "cudnn_available")
    caches = [getattr(dense_cudnn, name) for name in names]
    with (
        mock.patch.dict(sys.modules, cudnn=cudnn),
        mock.patch.object(dense_cudnn, "_current", lambda: (0, 5)),
    ):
        for cache in caches:
            cache.cache_clear()
        yield cudnn
    for cache in caches:
        cache.cache_clear()
