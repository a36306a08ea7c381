"""Convolutions at sites: submanifold, strided, inverse and transposed.

Each finds its KernelMap and computes :func:`site_conv` over it.
"""

from typing import Any

from ..core.arrays import array_function
from ..core.checks import check_array
from ..dense.packed_weights import PackedWeights
from ..errors import ShapeError
from .kept_calls import compute_again, keep_call
from .kernel_map import check_map, find_map, made_by
from .site_conv import compute, compute_by_plan
from .sparse_tensor import SparseTensor, check_tensor, sites_of


def submanifold_conv(
    x, w, *, dilation: Any = 1, groups=1, bias=None, scale=None, residual=None, activation=None,
    precision=None, out=None,
):  # fmt: skip
    """Convolve features, and compute the result at the same sites.

    ``y[p] = activation(scale * sum x[p - k // 2 * dilation + r * dilation] @ w[r] + bias +
    residual[p])`` for each site ``p``, the sum over the cells ``r`` of the kernel at whose place
    there is a site. The window of an axis is ``p - k // 2 .. p - k // 2 + k - 1``, also for an even
    ``k``. Sums are in float32 (float64 for float64), in the order of the cells.

    Parameters
    ----------
    x : SparseTensor
        Features in float16, bfloat16, float32 or float64.
    w : array, shape (*kernel_size, C / groups, K), or PackedWeights
        One axis for each axis of the grid; in the dtype of the features. On a GPU an array is
        packed at each call, a :class:`PackedWeights` once; that has its own scale and bias.
    dilation : int or tuple of int
        Distance between the taps of the kernel.
    groups : int
        Groups of channels that are convolved apart.
    bias, scale : float array, shape (K,), optional
        Offset and factor per output channel.
    residual : SparseTensor or array, shape (N, K), optional
        Added before the activation.
    activation : None, "relu", "silu" or "gelu"
        Applied last.
    precision : None, "ieee" or "tf32"
        As for :func:`conv2d`.
    out : array, shape (N, K), optional
        Receives the features of the result; shares no memory with the inputs.

    Returns
    -------
    SparseTensor
        Features ``[N, K]`` on the coordinates of ``x``, 0 in rows past the count.

    Raises
    ------
    ShapeError
        If sizes do not fit together.
    DTypeError
        If ``x`` is no SparseTensor, or dtypes are not floats or differ.
    ValueError
        If ``activation`` or ``precision`` is none of those above.

    Source: B. Graham, M. Engelcke, L. van der Maaten 2018, arXiv:1711.10275.

    Examples
    --------
    >>> import numpy as np
    >>> x = sparse_tensor(np.ones((3, 1)), np.array([[0, 1], [0, 2], [0, 5]]), spatial_shape=8)
    >>> submanifold_conv(x, np.ones((3, 1, 1))).features.ravel()
    array([2., 2., 1.])
    """
    if scale is None and bias is None and out is None:
        known = compute_again(x, w, residual, dilation, groups, activation, precision)
        if known is not None:
            return known
    return _submanifold_conv(
        x, w, dilation=dilation, groups=groups, bias=bias, scale=scale, residual=residual,
        activation=activation, precision=precision, out=out,
    )  # fmt: skip


@array_function
def _submanifold_conv(
    x, w, *, dilation, groups, bias, scale, residual, activation, precision, out
):  # fmt: skip
    """Compute what no call that is kept does, or one for which arrays had to pass the door."""
    options = (dilation, groups, activation, precision)
    alone = scale is None and bias is None and out is None
    known = compute_again(x, w, residual, *options) if alone else None
    if known is not None:
        return known
    kernel = checked_kernel(x, w)
    same = x.coordinates
    made = find_map(same, kernel, dilation=dilation, onto=same)
    residual = features_on(same, residual)
    y, plan = compute_by_plan(
        x.features, w, made, groups, scale, bias, residual, activation, precision, out
    )
    if alone:
        keep_call(x, w, made, residual, options, plan)
    return SparseTensor.computed(y, same)


@array_function
def strided_conv(
    x, w, *, stride, padding: Any = 0, dilation: Any = 1, groups=1, onto=None, capacity=None,
    bias=None, scale=None, residual=None, activation=None, precision=None, out=None,
):  # fmt: skip
    """Convolve features with a stride; the result has every site that reads one of ``x``.

    Site ``p`` of the result reads the sites ``p * stride - padding + r * dilation``. With a padding
    of 0 and a kernel no smaller than the stride this is SparseConvNet's ``Convolution``.

    Parameters
    ----------
    x, w, groups, bias, scale, residual, activation, precision, out
        As for :func:`submanifold_conv`; the residual and ``out`` have the rows of the result.
    stride, padding, dilation : int or tuple of int
        As for :func:`kernel_map`.
    onto : CoordinateMap or SparseTensor, optional
        Sites of the result, in place of those that are found.
    capacity : int, optional
        Rows of the result. With it nothing waits for a GPU; see :func:`coordinate_map`.

    Returns
    -------
    SparseTensor
        On new sites, in leaf order, or on those of ``onto``.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`submanifold_conv` does.

    Source: Graham et al. 2018, arXiv:1711.10275.

    Examples
    --------
    >>> import numpy as np
    >>> x = sparse_tensor(np.ones((3, 1)), np.array([[0, 1], [0, 2], [0, 5]]), spatial_shape=8)
    >>> y = strided_conv(x, np.ones((2, 1, 1)), stride=2)
    >>> y.indices.tolist(), y.features.ravel(), y.spatial_shape
    ([[0, 0], [0, 1], [0, 2]], array([1., 1., 1.]), (4,))
    """
    made = strided_map(x, w, stride, padding, dilation, onto=onto, capacity=capacity)
    return _convolve(x, w, made, groups, scale, bias, residual, activation, precision, out)


@array_function
def inverse_conv(
    x, w, *, onto, groups=1, bias=None, scale=None, residual=None, activation=None, precision=None,
    out=None,
):  # fmt: skip
    """Undo the sites of a strided convolution: from its result back to the sites that it read.

    Each site of ``onto`` adds up what the windows that read it hold, each times the kernel's cell
    at which they read it: the transpose of the strided convolution, with weights of its own.
    SparseConvNet's ``Deconvolution``, spconv's ``SparseInverseConv``.

    Parameters
    ----------
    x : SparseTensor
        On the sites that a :func:`strided_conv` of ``onto`` made (or a pooling).
    w : array, shape (*kernel_size, C / groups, K), or PackedWeights
        With the kernel size of that convolution.
    onto : CoordinateMap or SparseTensor
        The sites that it read.
    groups, bias, scale, residual, activation, precision, out
        As for :func:`submanifold_conv`.

    Returns
    -------
    SparseTensor
        On the sites of ``onto``. If the sites of ``x`` had a capacity, ``x.coordinates.check()``
        tells whether it was enough; that of the result does not.

    Raises
    ------
    ValueError
        If there was no such convolution, or these are copies of its sites, as from a pickle.
    ShapeError, DTypeError
        As :func:`submanifold_conv` does.

    Source: Graham et al. 2018, arXiv:1711.10275.

    Examples
    --------
    >>> import numpy as np
    >>> x = sparse_tensor(np.ones((3, 1)), np.array([[0, 1], [0, 2], [0, 5]]), spatial_shape=8)
    >>> y = strided_conv(x, np.ones((2, 1, 1)), stride=2)
    >>> inverse_conv(y, np.array([[[1.0]], [[10.0]]]), onto=x).features.ravel()
    array([10.,  1., 10.])
    """
    made = map_back_to(onto, x, w)
    return _convolve(x, w, made, groups, scale, bias, residual, activation, precision, out)


@array_function
def transposed_conv(
    x, w, *, stride, padding: Any = 0, output_padding: Any = 0, dilation: Any = 1, groups=1,
    capacity=None, bias=None, scale=None, residual=None, activation=None, precision=None, out=None,
):  # fmt: skip
    """Convolve features transposed; the result has every site that one of ``x`` reaches.

    Site ``p`` of ``x`` adds to the sites ``p * stride - padding + r * dilation``. SparseConvNet's
    ``FullConvolution``.

    Parameters
    ----------
    x, w, groups, bias, scale, residual, activation, precision, out
        As for :func:`submanifold_conv`; the residual and ``out`` have the rows of the result.
    stride, padding, dilation, output_padding : int or tuple of int
        As for :func:`kernel_map`.
    capacity : int, optional
        Rows of the result. With it nothing waits for a GPU; see :func:`coordinate_map`.

    Returns
    -------
    SparseTensor
        On new sites, in leaf order.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`submanifold_conv` does.

    Source: Graham et al. 2018, arXiv:1711.10275.

    Examples
    --------
    >>> import numpy as np
    >>> x = sparse_tensor(np.ones((2, 1)), np.array([[0, 1], [0, 2]]), spatial_shape=4)
    >>> y = transposed_conv(x, np.array([[[1.0]], [[2.0]]]), stride=2)
    >>> y.indices.tolist(), y.features.ravel()
    ([[0, 2], [0, 3], [0, 4], [0, 5]], array([1., 2., 1., 2.]))
    """
    made = strided_map(
        x, w, stride, padding, dilation, capacity=capacity, output_padding=output_padding,
        transposed=True,
    )  # fmt: skip
    return _convolve(x, w, made, groups, scale, bias, residual, activation, precision, out)


def strided_map(x, w, stride, padding, dilation, **options):
    """Return the map of a strided or transposed convolution."""
    kernel, padding = checked_kernel(x, w), 0 if padding is None else padding
    return find_map(
        x.coordinates, kernel, stride=stride, padding=padding, dilation=dilation, **options
    )


def map_back_to(onto, x, w):
    """Return the map of an inverse convolution to the sites ``onto``."""
    kernel, onto = checked_kernel(x, w), sites_of(onto)
    check_map("onto", onto)
    return made_by(onto, kernel, x.coordinates).transposed()


def checked_kernel(x, w):
    """Return the kernel size of the weights of a SparseTensor, or raise."""
    check_tensor(x)
    if not (isinstance(w, PackedWeights) or hasattr(w, "shape")):
        check_array("w", w)
    return kernel_of(x, w)


def kernel_of(x, w):
    """Return the kernel size that weights for a SparseTensor have, of any library's arrays."""
    d = x.coordinates.dimensions
    if isinstance(w, PackedWeights):
        if len(w.kernel_size) == d:
            return w.kernel_size
        w = w.w
    if len(w.shape) != d + 2:
        raise ShapeError(
            f"w must have shape (*kernel_size, C / groups, K) with a kernel of {d} axes, got "
            f"{tuple(w.shape)}"
        )
    return tuple(map(int, w.shape[:d]))


def _convolve(x, w, made, groups, scale, bias, residual, activation, precision, out):
    """Compute a convolution over a map; return the SparseTensor."""
    residual = features_on(made.target, residual)
    y = compute(x.features, w, made, groups, scale, bias, residual, activation, precision, out)
    return SparseTensor.computed(y, made.target)


def features_on(target, value, name="residual"):
    """Return the features of a residual on the sites ``target``, or what is no SparseTensor."""
    if not isinstance(value, SparseTensor):
        return value
    if value.coordinates is not target:
        raise ShapeError(
            f"{name} must be on the coordinates of the result, got others; pass the features "
            "alone if the rows are the same sites"
        )
    return value.features
