"""An image, its mask, a list of active blocks and their stack: small, for calls of every kind."""

import numpy as np

X = np.random.default_rng(0).standard_normal((2, 8, 8, 3)).astype(np.float32)
MASK = (X[..., 0] > 1).astype(np.float32)
ROWS = np.array([[0, 0, 1], [1, 1, 1], [0, 0, 0], [-1, -1, -1]], np.int32)
COUNT = np.array([3], np.int32)
BLOCKS = np.random.default_rng(1).standard_normal((4, 4, 4, 3)).astype(np.float32)
