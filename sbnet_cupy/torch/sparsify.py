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

    The image is cut into blocks of ``block_size`` pixels once, and blocks that hold a pixel of the
    mask are active. Activations are a stack of the active blocks, ``[M, C, b, b]``, where b shrinks
    with every stride. Layers that look at one pixel run on the stack as they are; those that look
    at neighbours read a rim from the blocks around; those that reduce over an image count active
    pixels. The image is whole at both ends alone.

    The result is that of ``model`` in which every activation outside the active blocks is 0, the
    input included, and the result too, up to rounding; on a full mask that of ``model``. But batch
    norms in training, and in evaluation those without running statistics, take the statistics of
    active pixels alone.

    The network is not changed: its modules are called with a tensor of the image's shape that holds
    the stack. A function that has no form for it is computed on the whole image, and named in
    :meth:`SparseModel.table`; one that cannot be is refused with its name. What follows a result
    that fits no grid of blocks (a stride does not divide the block, pixels become tokens) is dense,
    outside the blocks too, until it meets a stack again: its products are in the table.

    Parameters
    ----------
    model : torch.nn.Module
        Called with one image ``[N, C, H, W]``. It is held, not copied, as
        ``DistributedDataParallel`` does.
    block_size : int, (int, int) or "auto"
        Block of the input in pixels, best a multiple of the network's total stride. "auto" takes
        32, 64 or 128 by the ``sample_masks``.
    capacity : None, int, float or "auto"
        Blocks to make room for, or the share of all blocks. None reads the number from the device,
        and on a GPU makes room for up to an eighth more, so that masks of about as many blocks have
        stacks of one size; with a capacity nothing waits, and blocks past it are left out:
        ``sparse.overflowed`` says so. "auto" is the largest share of the ``sample_masks`` and a
        quarter more.
    halo : {"zero", "exact"}
        With "exact" blocks are active as far around the mask as the network looks, so that the
        result at the mask's pixels is that of ``model``. For shallow networks: the receptive field
        of deep ones covers the image. It is known after the first call, which runs twice.
    outside : number, "bias" or tensor
        What the result holds outside active blocks: "bias" is what the last convolution makes of
        zeros; a tensor has the shape of the result. A result that fits no grid of blocks is refused
        where this is not 0; where others fit, a RuntimeWarning says that it is left as it is.
    sample_masks : list of tensors ``[N, H, W]``, optional
        Usual masks, for "auto".
    replay : "auto", True or False
        On a GPU, in evaluation without gradients, a call like an earlier one (shapes, strides,
        dtypes, stream, options, and without a ``capacity`` the room for blocks) is captured in a
        CUDA graph, and replayed from then on: with a ``capacity`` the host is free at once. A graph
        repeats what ran on the device, not Python code: ``print`` and counters of a module's
        ``forward`` do not run again. Parameters, buffers and attributes of modules and of their
        classes that change are seen, also in lists, dicts, arrays, objects and closures, and the
        graph is made anew; numbers and tensors that a module takes from elsewhere are not. A
        network has no graph if it has hooks, or its modules keep more than 4096 such items or 64 KB
        of arrays, or what changes where Python does not see it (a generator of random numbers, an
        iterator); nor has a call under a profiler or with more arguments. Calls under autocast have
        graphs of their own. One that cannot be captured says so in a RuntimeWarning once. At most
        eight graphs are kept, which share the memory of their activations.
        On a CPU, in evaluation without gradients and with or without a ``capacity``, the functions
        that a second call alike computes are recorded, and later calls run them with other images
        and masks, without the modules' Python code. What is true of graphs is true of these tapes:
        what changes is seen, and what cannot be recorded, as a number that is read from a tensor,
        runs at each call. False runs each call.
        True is "auto", and on a GPU calls that record gradients are captured and replayed, too,
        with their gradients, under autocast as well: several times as fast as the calls. The second
        call alike is captured, which takes as long as some six. Optimizers, hooks of parameters,
        gradients that add up and ``DistributedDataParallel`` work as usual. What a replay could not
        do runs at each call, as without graphs: a call while the gradients of the call before it
        may still be asked for, as where one loss has two calls; calls of which a result has no
        gradient, as it is in no loss; a module with hooks or an attribute that each call sets; and,
        with one RuntimeWarning, a network that draws random numbers on the host, hangs hooks on
        tensors, waits for the device or communicates (``SyncBatchNorm``). Gradients that are asked
        for twice (``retain_graph``), or that have gradients (``create_graph``), run the call once
        more. Activations of one call stay allocated between steps: memory for them is shared by all
        graphs, and ``sparse.replay = "auto"`` frees it.
        Weights that are written to past autograd's versions, through ``weight.data``, NumPy, memory
        that another process shares (Hogwild) or a fused optimizer that trains ``model`` by itself,
        do not show that they changed, with any ``replay``: call ``sparse.eval()`` after it, in the
        process that evaluates.

    Returns
    -------
    SparseModel
        Called as ``sparse(x, mask)``; ``sparse.model`` is the network.

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
    raise TypeError(f"sample_masks must be a list of tensors, got {type(masks).__name__}")


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
