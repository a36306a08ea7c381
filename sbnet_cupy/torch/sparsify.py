"""sparsify: a whole network that computes only where a mask is set."""

from typing import Any

import torch

from ..block_sparse.checks import check_capacity
from ..core.sizes import pair
from .network.ends import as_bool
from .network.model import SparseModel
from .network.table import active_blocks
from .nn import SparseBottleneck, SparseConv2d

_CANDIDATES = (32, 64, 128)


def sparsify(
    model, block_size: Any = 32, capacity=None, *, halo="zero", outside: Any = 0.0,
    sample_masks=None, replay: Any = "auto",
):  # fmt: skip
    """Return a network that computes only in blocks in which a mask of its input is set.

    The image is cut into blocks of ``block_size`` pixels once, and blocks that contain a pixel of
    the mask are active. Activations are a stack of the active blocks, ``[M, C, b, b]``, where b
    shrinks with every stride. Layers that read one pixel run on the stack as they are; layers that
    read neighbours get a rim of pixels from the blocks around; layers that reduce over an image use
    the active pixels. Whole images exist only at the input and the output.

    The result equals, up to rounding, that of ``model`` with every activation outside the active
    blocks set to 0, input and result included; on a full mask it equals that of ``model``. But
    batch norms in training, and those without running statistics, use the statistics of active
    pixels only.

    The network is not changed: its modules are called with a tensor subclass that has the image's
    shape and holds the stack. A function that cannot run on a stack is computed on the whole image,
    and named in :meth:`SparseModel.table`; one that cannot run either way raises an error with its
    name. After a result that fits no grid of blocks (a stride does not divide the block, pixels
    become tokens), layers are dense, also outside the blocks, until they meet a stack again: the
    table says which.

    Parameters
    ----------
    model : torch.nn.Module
        Called with one image ``[N, C, H, W]``. It is held, not copied, as
        ``DistributedDataParallel`` does.
    block_size : int, (int, int) or "auto"
        Block of the input in pixels, best a multiple of the network's total stride. "auto" chooses
        32, 64 or 128 from the ``sample_masks``.
    capacity : None, int, float or "auto"
        Maximum number of active blocks, or their share of all blocks (a float). None reads the
        number from the device, and on a GPU makes room for up to an eighth more, so that masks with
        about as many blocks have stacks of one size. With a capacity nothing waits, and blocks past
        it are left out: ``sparse.overflowed`` says so, and ``sparse.check()`` raises. "auto" is the
        largest share of the ``sample_masks`` and a quarter more.
    halo : {"zero", "exact"}
        With "exact", blocks are also active around the mask, as far as the network's receptive
        field reaches, so that the result at the mask's pixels is that of ``model``. For shallow
        networks: the receptive field of deep ones covers the image. It is measured at the first
        call, which runs twice.
    outside : number, "bias" or tensor
        Values of the result outside active blocks. "bias" is what the last convolution makes of
        zeros; a tensor has the shape of the result. Other values than 0 raise an error for a result
        that fits no grid of blocks; if other results fit, a RuntimeWarning says that it is left as
        it is.
    sample_masks : list of tensors ``[N, H, W]``, optional
        Typical masks, for "auto".
    replay : "auto", True or False
        Whether repeated calls are replayed without running the modules' Python code again.

        With "auto" they are, in evaluation without gradients. On a GPU a call like an earlier one
        (same shapes, strides, dtypes, stream and options, and without a ``capacity`` the same room
        for blocks) is captured in a CUDA graph and replayed from then on; with a ``capacity`` the
        host does not wait. On a CPU the functions that a second such call computes are recorded,
        and later calls run them on other images and masks.

        - ``print`` and counters in a module's ``forward`` do not run again.
        - Changed parameters, buffers and attributes of modules and of their classes are noticed,
          also inside lists, dicts, arrays, objects and closures, and the recording is made anew.
          Changed numbers and tensors that a module takes from elsewhere are not.
        - Calls run as usual if the network has hooks; if its modules keep more than 4096 such items
          or 64 KB of arrays, or state that changes unseen (a random generator, an iterator); under
          a profiler; with more arguments; and where something cannot be recorded, such as a number
          that is read from a tensor. If a capture fails, a RuntimeWarning says so once.
        - On a GPU a copy of the network is called once or twice, without computing anything, before
          the first call of a kind, to find and compile its kernels at once; in training, too. Only
          what the modules' code does elsewhere, such as ``print``, shows. Not with False.
        - Calls under autocast have graphs of their own. At most eight graphs are kept, which share
          the memory of their activations.

        True is "auto", and on a GPU also replays calls that record gradients, with their gradients
        and also under autocast: several times as fast as eager calls. The second such call is
        captured, which takes as long as about six. Optimizers, hooks of parameters, accumulated
        gradients and ``DistributedDataParallel`` work as usual. These run eagerly: a call while
        gradients of the call before it may still be needed, as with two calls in one loss; calls
        with a result that gets no gradient; a module with hooks, or with an attribute that each
        call sets; and, with one RuntimeWarning, a network that draws random numbers on the host,
        puts hooks on tensors, waits for the device or communicates (``SyncBatchNorm``). Gradients
        with ``retain_graph`` or ``create_graph`` run the call once more. The activations of one
        call stay allocated between steps, in memory that all graphs share;
        ``sparse.replay = "auto"`` frees it.

        With any ``replay``, changes of weights that autograd's versions do not count are not
        noticed: writes through ``weight.data``, NumPy or memory shared with another process
        (Hogwild), and steps of a fused optimizer that trains ``model`` by itself. Call
        ``sparse.eval()`` after them, in the process that evaluates.

    Returns
    -------
    SparseModel
        Called as ``sparse(x, mask)``, with a mask ``[N, H, W]`` or ``[N, 1, H, W]``, True or over 0
        where to compute (NaN is not); see :meth:`SparseModel.forward`. ``sparse.model`` is the
        network.

    Raises
    ------
    TypeError
        If ``model`` is no module, or compiled, as a whole or a part, or one of TorchScript.
    ValueError
        If it is sparse already, or an option is none of the above.

    Source: Ren et al. 2018, arXiv:1801.02108, section 3, for one layer.

    Examples
    --------
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 2, padding=1), torch.nn.ReLU()).eval()
    >>> sparse = sparsify(net, block_size=16)
    >>> x, full = torch.randn(1, 3, 64, 64), torch.ones(1, 64, 64, dtype=torch.bool)
    >>> torch.allclose(sparse(x, full), net(x), atol=1e-5)
    True
    >>> corner = torch.zeros(1, 64, 64, dtype=torch.bool)
    >>> corner[:, :20, :10] = True  # 2 of 16 blocks
    >>> y = sparse(x, corner)
    >>> print(sparse.table())
    layer  function  runs                    GFLOP  computed
    0      conv2d    stack, blocks of 16x16  0.000  12.5%
    1      relu      stack, blocks of 8x8           12.5%
    """
    _check_model(model)
    masks = _samples(sample_masks, block_size, capacity)
    if isinstance(block_size, str):
        block_size = _best_block(masks)
    block_size = pair(block_size, "block_size")
    if isinstance(capacity, str):
        capacity = min(1.25 * max(_share(mask, block_size) for mask in masks), 1.0)
        capacity = max(capacity, 1e-6)
    capacity = check_capacity(capacity, ', or "auto"')
    return SparseModel(model, block_size, capacity, halo, outside, replay)


def _check_model(model):
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"model must have layers in Python, got a {type(model).__name__} of TorchScript, which "
            "would run as one function of whole images; give the module that it was made of"
        )
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or vars(module).get("_compiled_call_impl"):
            part = f"of which torch.compile has compiled {name!r}" if name else "of torch.compile"
            raise TypeError(
                f"model must not be compiled yet, got a network {part}; give it uncompiled, and "
                "compile what sparsify returns"
            )
        if isinstance(module, SparseModel | SparseConv2d | SparseBottleneck):
            where = f"in {name!r} " if name else ""
            is_network = isinstance(module, SparseModel)
            instead = "the network that it holds, .model," if is_network else "dense layers"
            raise ValueError(
                f"model must be dense, got a {type(module).__name__} {where}that is sparse "
                f"already; use {instead} in its place"
            )


def _samples(masks, block_size, capacity):
    """Return the sample masks as bool ``[N, H, W]``, or raise where "auto" has none."""
    found = [_sample(mask) for mask in _list(masks)]
    for name, value in (("block_size", block_size), ("capacity", capacity)):
        if isinstance(value, str) and value != "auto":
            raise ValueError(f'{name} must be numbers or "auto", got {value!r}')
        if isinstance(value, str) and not found:
            raise ValueError(f'{name}="auto" needs sample_masks, a list of masks [N, H, W]')
    return found


def _list(masks):
    if masks is None or isinstance(masks, list | tuple):
        return masks or ()
    raise TypeError(
        f"sample_masks must be a list of tensors, got {type(masks).__name__}; pass [mask] for one"
    )


def _sample(mask):
    """Return a sample mask as bool ``[N, H, W]``, or raise."""
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"sample_masks must be tensors [N, H, W], got {type(mask).__name__}")
    mask = mask.squeeze(1) if mask.dim() == 4 else mask
    if mask.dim() != 3 or mask.numel() == 0 or mask.is_complex():
        raise ValueError(
            "sample_masks must be tensors [N, H, W] or [N, 1, H, W] of bool or real numbers, with "
            f"a pixel at least, got {mask.dtype} {tuple(mask.shape)}"
        )
    return as_bool("sample_masks", mask)


def _share(mask, block):
    return active_blocks(mask, block).float().mean().item()


def _best_block(masks):
    """Return the block with the least estimated work: active area, and rims of a few pixels."""

    def work(block):
        active = sum(_share(mask, (block, block)) for mask in masks)
        return active * (1 + 5 / block)

    return min(_CANDIDATES, key=work)
