"""Features at sites as tensors."""

import numpy as np

SHAPE = (7, 6)


def sites_of(torch, device="cpu", shape=SHAPE, share=0.5, batch=2, seed=0):
    """Return rows of distinct sites in some order."""
    rng = np.random.default_rng(seed)
    rows = np.argwhere(rng.random((batch, *shape)) < share)
    return torch.as_tensor(rng.permutation(rows), device=device)


def values(torch, *shape, device="cpu", seed=1, dtype=None):
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return made.to(device, dtype or torch.float64)


def made(torch, st, device="cpu", channels=4, seed=0, **options):
    rows = sites_of(torch, device, options.pop("shape", SHAPE), seed=seed)
    features = values(torch, len(rows), channels, device=device, dtype=options.pop("dtype", None))
    shape = options.pop("spatial_shape", SHAPE)
    return st.sparse_tensor(features, rows, spatial_shape=shape, batch_size=2, **options)


def image_of(st, x):
    return st.sparse_to_dense(x, data_format="channels_first")


def at_sites(image, x):
    """Return the pixels of an NCHW image at the sites of x."""
    n, *position = x.indices.long().T
    return image.movedim(1, -1)[(n, *position)]


def oihw(w):
    return w.movedim(-1, 0).movedim(-1, 1)


def assert_close(torch, a, b, factor=1):
    torch.testing.assert_close(a, b, rtol=1e-12 * factor, atol=1e-12 * factor)
