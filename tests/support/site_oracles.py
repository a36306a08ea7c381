"""What is computed at sites, by loops over a dictionary {(sample, *position): features}."""

import itertools

import numpy as np


def sites_of(indices, features):
    """Return the dictionary of distinct rows."""
    return {
        tuple(map(int, row)): np.asarray(values, np.float64)
        for row, values in zip(indices, features, strict=True)
    }


def cells(kernel):
    """Return the cells of a kernel, in the order of its taps."""
    return list(itertools.product(*map(range, kernel)))


def reads(position, cell, stride, padding, dilation):
    """Return the site that site ``position`` of a convolution's result reads at a cell."""
    return tuple(
        p * s - pad + r * d
        for p, r, s, pad, d in zip(position, cell, stride, padding, dilation, strict=True)
    )


def coarse_sites(sites, kernel, stride, padding, dilation, shape):
    """Return every (sample, *position) inside ``shape`` that reads a site."""
    return {
        (sample, *position)
        for position in itertools.product(*map(range, shape))
        for sample in {site[0] for site in sites}
        if any(
            (sample, *reads(position, cell, stride, padding, dilation)) in sites
            for cell in cells(kernel)
        )
    }


def convolve(sites, w, wanted, stride, padding, dilation):
    """Return the convolution at the wanted sites, and the sum of magnitudes: float64 [sites, K].

    ``w`` is ``[*kernel, C, K]``.
    """
    kernel, k = w.shape[:-2], w.shape[-1]
    total, size = np.zeros((2, len(wanted), k))
    for row, (sample, *position) in enumerate(wanted):
        for cell in cells(kernel):
            read = sites.get((sample, *reads(position, cell, stride, padding, dilation)))
            if read is not None:
                total[row] += read @ w[cell]
                size[row] += abs(read) @ abs(w[cell])
    return total, size


def transpose(sites, w, wanted, stride, padding, dilation):
    """Return the transposed convolution at the wanted sites, and the sum of magnitudes."""
    kernel, k = w.shape[:-2], w.shape[-1]
    at = {site: row for row, site in enumerate(wanted)}
    total, size = np.zeros((2, len(wanted), k))
    for (sample, *position), values in sites.items():
        for cell in cells(kernel):
            row = at.get((sample, *reads(position, cell, stride, padding, dilation)))
            if row is not None:
                total[row] += values @ w[cell]
                size[row] += abs(values) @ abs(w[cell])
    return total, size


def fine_sites(sites, kernel, stride, padding, dilation, shape):
    """Return every (sample, *position) inside ``shape`` that a transposed convolution reaches."""
    found = set()
    for (sample, *position), cell in itertools.product(sites, cells(kernel)):
        reached = reads(position, cell, stride, padding, dilation)
        if all(0 <= p < n for p, n in zip(reached, shape, strict=True)):
            found.add((sample, *reached))
    return found


def dense_groups(w, groups):
    """Return the kernel of a grouped convolution as one of all channels, 0 between groups."""
    *kernel, c, k = w.shape
    full = np.zeros((*kernel, c * groups, k))
    for g in range(groups):
        mine = slice(g * (k // groups), (g + 1) * (k // groups))
        full[..., g * c : (g + 1) * c, mine] = w[..., mine]
    return full
