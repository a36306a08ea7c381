"""Find the sources of light in a picture: differences of Gaussians, over the lit blocks only."""

from itertools import pairwise
from pathlib import Path

import numpy as np

from .. import calc_block_params, conv2d, masks, sparse_conv2d
from . import torch_dense
from .compare import STEPS, compare
from .inputs import check_size
from .picture_file import grey, hubble_deep_field, read_mask, read_picture
from .report import Report

KERNEL = 11  # pixels
SCALES = (0.9, 1.4, 2.1, 3.2)  # standard deviations in pixels, each 1.5 times the one before
LIGHT = 15.0  # a pixel holds light when it is this many standard deviations of noise above the sky
SOURCE = 40.0  # a source is a peak whose best matching kernel answers with this many
PEAK_RADIUS = 2  # pixels between a peak and any higher pixel
BLOCK_SIZE = 22


def run(path, mask_path, block_size, xp, progress):
    """Run the detector on a picture file, or on the Hubble deep field when ``path`` is None."""
    name = "Hubble deep field" if path is None else Path(path).name
    progress.step(f"reading {name}", of=STEPS + 3)
    picture = hubble_deep_field() if path is None else read_picture(path)
    check_size(name, picture.pixels.shape, block_size)
    values, unit = above_sky(grey(picture.pixels))
    if mask_path is None:
        mask = masks.threshold(values, LIGHT)
    else:
        mask = read_mask(mask_path, picture.file_size, picture.factor)[None]
        unit = Path(mask_path).name
    shown, reduced_from = picture.for_screen(), (*picture.file_size, picture.factor)
    del picture  # its pixels take four times as much where they are means
    result = detect(values, mask, block_size, xp, progress)
    progress.step("finding the sources")
    return Report(
        name=name,
        task=f"{len(SCALES) - 1} differences of Gaussians, {KERNEL} x {KERNEL}, float32",
        picture=shown,
        picture_label="picture",
        mask=mask[0],
        mask_label=f"mask: {unit}",
        response_label="response of the best of the kernels, sources circled",
        result=result,
        reduced_from=reduced_from if reduced_from[2] > 1 else None,
        **_sources(result, xp),
    )


def detect(values, mask, block_size, xp, progress):
    """Convolve float32 [H, W] with the kernels, densely and at the blocks of a mask [1, H, W]."""
    image, kernels = xp.asarray(values[None, :, :, None]), xp.asarray(difference_of_gaussians())
    params = calc_block_params(image.shape, block_size, KERNEL)
    return compare(
        xp.asarray(mask),
        params,
        dense=lambda: conv2d(image, kernels),
        sparse=lambda indices: sparse_conv2d(image, kernels, indices, params),
        terms=KERNEL * KERNEL,
        progress=progress,
        torch_dense=torch_dense.convolution(image, kernels),
    )


def _sources(result, xp):
    """Return what a Report says of the sources in the dense and in the block-sparse result."""
    dense, sparse = (answer[0].max(axis=2) for answer in (result.dense, result.sparse))
    found = [peaks(response, xp) for response in (dense, sparse)]
    return {
        "response": sparse,
        "points": xp.argwhere(found[1]),
        "rows": [
            ("sources found", *(int(peak.sum()) for peak in found)),
            ("... by both", "", int((found[0] & found[1]).sum())),
        ],
    }


def above_sky(values):
    """Rescale to standard deviations of noise above the sky, both robust; and say what LIGHT is.

    The median is the sky and the median absolute deviation its noise. Where nothing stands out
    that far, as in a daylight photograph, the unit is chosen to make the brightest tenth light.
    """
    sky = np.median(values)
    noise = 1.4826 * np.median(np.abs(values - sky))  # of a Gaussian, from the MAD
    if noise == 0:
        noise = np.std(values)
    if noise and (values > sky + LIGHT * noise).any():
        return ((values - sky) / noise).astype(np.float32), f"sky + {LIGHT:g} sigma"
    level = np.quantile(values, 0.9) - sky
    return ((values - sky) * (LIGHT / (level or 1))).astype(np.float32), "the brightest tenth"


def difference_of_gaussians():
    """Return kernels [KERNEL, KERNEL, 1, len(SCALES) - 1], each of sum 0 and Euclidean norm 1.

    With norm 1, white noise of standard deviation 1 gives answers of standard deviation 1, and the
    kernel most like a source answers most.

    Source: Marr and Hildreth 1980, Theory of edge detection; Lowe 2004 for the ratio of scales.
    """
    t = np.arange(KERNEL) - KERNEL // 2
    profiles = [np.exp(-(t**2) / (2 * sigma**2)) for sigma in SCALES]
    gaussians = [np.outer(p, p) / p.sum() ** 2 for p in profiles]
    kernels = [fine - coarse for fine, coarse in pairwise(gaussians)]
    kernels = [kernel / np.linalg.norm(kernel) for kernel in kernels]
    return np.stack(kernels, axis=-1)[:, :, None, :].astype(np.float32)


def peaks(response, xp):
    """Return where ``response`` [H, W] exceeds SOURCE and everything within PEAK_RADIUS.

    Not within half a kernel of the border: there the padding answers, not the picture.
    """
    highest = response
    for axis in (0, 1):
        padded = xp.pad(xp.moveaxis(highest, axis, 0), [(PEAK_RADIUS,) * 2, (0, 0)])
        shifted = [padded[i : i + response.shape[axis]] for i in range(2 * PEAK_RADIUS + 1)]
        highest = shifted[0]
        for other in shifted[1:]:
            highest = xp.maximum(highest, other)
        highest = xp.moveaxis(highest, 0, axis)
    found = xp.zeros(response.shape, dtype=bool)
    inner = (slice(KERNEL // 2, -(KERNEL // 2)),) * 2
    found[inner] = ((response == highest) & (response > SOURCE))[inner]
    return found
