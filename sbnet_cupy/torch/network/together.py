"""Copies of many tensors by few kernels: small ones lie side by side, and are copied as one."""

import torch

_MOST_BYTES = 1 << 20  # of a tensor that is moved beside others
_VECTOR = 16  # bytes, by which kernels read


class Together:
    """Tensors, of which some may be None, that are copied again and again.

    Parameters
    ----------
    tensors : list of tensor or None
        Written by a CUDA graph, which is being captured: it puts them side by side, too.
    """

    def __init__(self, tensors):
        self.tensors, groups = tensors, {}
        for number, tensor in enumerate(tensors):
            if tensor is not None and _is_small(tensor):
                groups.setdefault((tensor.device, tensor.dtype), []).append(number)
        # Whole vectors come first, so that what follows them begins at a vector, too.
        self._groups = [sorted(g, key=self._has_rest) for g in groups.values() if len(g) > 1]
        self.joined = self.join()

    def _has_rest(self, number):
        return self.tensors[number].nbytes % _VECTOR > 0

    def join(self):
        """Return the small tensors of each dtype side by side."""
        return [torch.cat([_in_order(self.tensors[n]) for n in group]) for group in self._groups]

    def copies(self):
        """Return copies of the tensors, in their order; None where there is none."""
        copies = [None] * len(self.tensors)
        for group, joined in zip(self._groups, self.joined, strict=True):
            whole, start = joined.clone(), 0
            for number in group:
                tensor = self.tensors[number]
                copies[number] = whole.as_strided(tensor.shape, tensor.stride(), start)
                start += tensor.numel()
        for number, tensor in enumerate(self.tensors):
            if tensor is not None and copies[number] is None:
                copies[number] = tensor.clone()
        return copies


def _is_small(tensor):
    """Whether a tensor has few bytes, without gaps."""
    if tensor.layout != torch.strided or tensor.nbytes > _MOST_BYTES:
        return False
    if tensor.is_contiguous():
        return True
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _in_order(tensor):
    """Return the numbers of a tensor without gaps, as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
