"""Weights in training: packed as they lie, for one convolution, by one kernel."""

import torch

from . import cuda


class Fresh:
    """A weight of a convolution that is packed in each call, as it changes from step to step.

    Parameters
    ----------
    weight : tensor, shape (Cout, Cin, kh, kw)
        In any layout; of ``dtype``, or float32, which is rounded.
    dtype : torch.dtype
        That of the stack.
    turned : bool
        Whether the kernel is turned round and its channels change places, as the gradient of a
        convolution takes it.
    """

    requires_grad = False

    def __init__(self, weight, dtype, turned=False):
        self.weight, self.dtype, self.turned = weight.detach(), dtype, turned
        k, c, *kernel = weight.shape
        self.shape = (c, k, *kernel) if turned else (k, c, *kernel)

    def tensor(self):
        """Return it as a tensor."""
        weight = self.weight.to(self.dtype)
        return weight.flip(2, 3).transpose(0, 1) if self.turned else weight

    def packed(self, packs, bias):
        """Return the bytes that the kernel reads, by the launches in ``packs``."""
        step_k, step_c, *steps = self.weight.stride()
        offset = 0
        if self.turned:  # from the last tap on
            last = sum(s * (n - 1) for s, n in zip(steps, self.shape[2:], strict=True))
            offset = last * self.weight.element_size()
            steps, step_k, step_c = [-s for s in steps], step_c, step_k
        launch = packs.strided((*steps, step_c, step_k), cuda._ELEMENTS[self.weight.dtype])
        nbytes, device = packs.conv.packed_bytes, self.weight.device
        packed = torch.empty(nbytes, dtype=torch.uint8, device=device)
        wide = None if bias is None else bias.detach().float().contiguous()
        table = None if wide is None else cuda._At(wide)
        launch(cuda._At(self.weight, offset), None, table, cuda._At(packed))
        return packed
