"""The convolution of a stack of blocks, as an operator of PyTorch with derivatives of any order.

PyTorch computes it (cuDNN on a GPU), at the precision that was asked for whatever
``torch.backends`` says.
"""

import contextlib
import threading

import torch

from ..dense.onednn import step_to_one_column
from . import _dispatch_state as state
from ._operation import define


@contextlib.contextmanager
def exactly(precision, x):
    """Let cuDNN multiply as ``precision`` says, reproducibly; nothing to say elsewhere.

    ``torch.backends.cudnn.flags`` will not do: it fails where the user has set ``fp32_precision``.
    """
    if not x.is_cuda:
        yield
        return
    cudnn = torch.backends.cudnn
    wanted = [(cudnn, "benchmark", False), (cudnn, "deterministic", True)]
    if hasattr(cudnn, "conv"):  # PyTorch 2.9 and newer
        wanted.append((cudnn.conv, "fp32_precision", precision or "ieee"))
    else:
        wanted.append((cudnn, "allow_tf32", precision == "tf32"))
    with _FLAGS:
        before = [(holder, name, getattr(holder, name)) for holder, name, _ in wanted]
        try:
            for flag in wanted:
                setattr(*flag)
            yield
        finally:
            for flag in before:
                setattr(*flag)


_FLAGS = threading.RLock()  # the flags are the process's: one thread at a time sets them


def convolve(x, w, strides, precision):
    """Return the convolution, without padding, of an NHWC stack with an OIHW kernel."""
    return (_forward if _is_direct(x, w) else _CONVOLVE)(x, w, strides, precision)


def convolve_backward(grad, x, w, strides, precision, for_x, for_w):
    """Return the gradients of x and w; one that is not asked for has no elements."""
    body = _backward if _is_direct(grad, x, w) else _BACKWARD
    return body(grad, x, w, strides, precision, for_x, for_w)


def _is_direct(*tensors):
    """Whether the dispatcher would do no more than call the body."""
    there = state.thread_is_plain() and not torch.is_grad_enabled()
    return there and all(map(state.is_plain, tensors))


def convolve_plainly(x, w, strides):
    """Return the convolution of NumPy arrays, an NHWC stack and an OIHW kernel, by PyTorch."""
    return _forward(torch.from_numpy(x), torch.from_numpy(w), strides, None).numpy()


def _save(ctx, inputs, output):
    ctx.options = [a for a in inputs if not isinstance(a, torch.Tensor)]
    ctx.save_for_backward(*(a for a in inputs if isinstance(a, torch.Tensor)))


def _forward(x, w, strides, precision):
    if not w.shape[1]:  # no channels: PyTorch gives a result of none
        axes = zip(x.shape[1:3], w.shape[2:], strides, strict=True)
        size = [(n - k) // s + 1 for n, k, s in axes]
        return x.new_zeros(x.shape[0], *size, w.shape[0])
    x, strides, _ = _one_column(x, w, strides)
    with exactly(precision, x):
        y = torch.ops.aten.convolution(
            x.permute(0, 3, 1, 2), w, None, strides, (0, 0), (1, 1), False, (0, 0), 1
        )
    return y.permute(0, 2, 3, 1).contiguous()


def _one_column(x, w, strides):
    """Return the image and strides of an equal convolution, and the columns that it leaves out.

    They are other ones where oneDNN gets the result or, in bfloat16, the gradient wrong.
    """
    step = None if x.is_cuda else step_to_one_column(x.shape[3], x.shape[2], w.shape[3], strides)
    if step is None:
        return x, strides, 0
    return x[:, :, : w.shape[3]], step, x.shape[2] - w.shape[3]


def _forward_backward(ctx, grad):
    x, w = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:2])
    for_x, for_w = convolve_backward(grad, x, w, *ctx.options, *wanted)
    return for_x if wanted[0] else None, for_w if wanted[1] else None, None, None


def _backward(grad, x, w, strides, precision, for_x, for_w):
    if not x.is_cuda:
        w = w.contiguous()  # the CPU's own convolution refuses others where it has to find dw
    x, strides, unread = _one_column(x, w, strides)
    with exactly(precision, x):
        dx, dw, _ = torch.ops.aten.convolution_backward(
            grad.permute(0, 3, 1, 2), x.permute(0, 3, 1, 2), w, None, strides, (0, 0), (1, 1),
            False, (0, 0), 1, (for_x, for_w, False),
        )  # fmt: skip
    if for_x and unread:
        dx = torch.nn.functional.pad(dx, (0, unread))
    return (
        dx.permute(0, 2, 3, 1).contiguous() if for_x else x.new_empty(0),
        dw.contiguous() if for_w else w.new_empty(0),
    )


def _backward_backward(ctx, dx, dw):
    """Both results are bilinear: dx in (grad, w), dw in (grad, x)."""
    (grad, x, w), (*options, for_x, for_w) = ctx.saved_tensors, ctx.options
    to_grad = to_x = to_w = None
    if for_x:
        to_grad = convolve(dx, w, *options)
        to_w = convolve_backward(grad, dx, w, *options, False, True)[1]
    if for_w:
        more = convolve(x, dw, *options)
        to_grad = more if to_grad is None else to_grad + more
        to_x = convolve_backward(grad, x, dw, *options, True, False)[0]
    return to_grad, to_x, to_w, None, None, None, None


_CONVOLVE = define(
    "convolve(Tensor x, Tensor w, int[] strides, str? precision) -> Tensor",
    _forward, _forward, _forward_backward, _save,
)  # fmt: skip
_BACKWARD = define(
    "convolve_backward(Tensor grad, Tensor x, Tensor w, int[] strides, str? precision, bool for_x, "
    "bool for_w) -> (Tensor, Tensor)",
    _backward, _backward, _backward_backward, _save,
)  # fmt: skip
