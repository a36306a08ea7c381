"""sparse_conv2d on a CPU: the stack of blocks by PyTorch's own convolution, which is oneDNN's."""

import torch

from ..block_sparse import compositions, native
from ..block_sparse.background import fill_background
from ..block_sparse.block_params import BlockParams
from ..core.sizes import pair
from ..dense.activation import apply_affine
from ._convolve import convolve_plainly


def conv_on_cpu(dtype, options):
    """Return what computes a call on NumPy views of its tensors, or None to leave it to NumPy.

    Sums of half precision are NumPy's, which rounds them once.
    """
    params, strides, _, activation, data_format, w_format, _, method = options
    if method == "fused" or dtype is not torch.float32 or not _is_exact():
        return None
    params, last = BlockParams(*params), data_format == "NHWC"
    layout = compositions.layout_of_stack(last)

    def run(x, w, bin_counts, active_block_indices, scale, bias, base, out):
        active = bin_counts, active_block_indices
        if base is None:
            torch.from_numpy(out).zero_()  # by all threads
        else:
            fill_background(base, out)
        blocks = native.gather(x, *active, *compositions.grid_of(params), **layout)
        kernel = w.transpose([w_format.index(letter) for letter in "OIHW"])
        y = convolve_plainly(blocks, kernel, pair(strides, "strides"))
        apply_affine(y, scale, bias, activation)
        native.scatter(y, *active, out, params.bsize_out, **layout, out=out)

    return run


def _is_exact():
    """Whether oneDNN is there, and multiplies float32 as such."""
    mkldnn = torch.backends.mkldnn
    if not (mkldnn.is_available() and mkldnn.enabled):
        return False
    conv = getattr(mkldnn, "conv", mkldnn)  # PyTorch 2.9 and newer
    return getattr(conv, "fp32_precision", "ieee") in ("none", "ieee")
