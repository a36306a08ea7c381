"""Batch norms by the statistics of active pixels; without any, running ones stay as they are."""

import torch
from torch import nn
from torch.nn import functional as F

from . import cuda_norm, gradients
from . import tensor as T
from .plans import TrainedNorm

_COUNTING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def trained(x, running_mean, running_var, weight, bias, momentum, eps):
    """Normalize by the mean and variance of active pixels inside the image."""
    table, block, size, _, _ = T.facts(x)
    if running_mean is not None:  # first, as a checkpoint stops where it has what it wants
        _uncount_empty(table, block, size, running_mean)
    value = T.value_of(x)
    parameters = weight, bias, running_mean, running_var
    if cuda_norm.serves(value, table, block, size, parameters):
        where = table, block, size
        found = cuda_norm.statistics(value, *where, parameters, momentum, eps)
        row = None if table.trace is None else table.trace.row
        plan = TrainedNorm(value, T.facts(x), parameters[:2], found, float(eps), row)
        return T.postpone(table, plan, block, size, T.facts(x)[4])
    if table.filled(block, size) and value.numel() > value.shape[1]:
        out = F.batch_norm(value, running_mean, running_var, weight, bias, True, momentum, eps)
        return T.wrap(out, x)
    out, mean, variance, count = gradients.batch_norm(value, table, block, size, weight, bias, eps)
    if running_mean is not None:
        with torch.no_grad():
            unbiased = variance * (count / (count - 1).clamp(min=1))
            some = table.has_pixels(block, size)
            _follow(running_mean, mean, momentum, some)
            _follow(running_var, unbiased, momentum, some)
    return T.wrap(out, x)


def _follow(running, new, momentum, some):
    """Follow the statistics of a batch, unless ``some`` says that it has no pixel."""
    before = None if some is None else running.clone()
    running.mul_(1 - momentum).add_(new.to(running.dtype), alpha=momentum)
    if some is not None:
        running.copy_(torch.where(some, running, before))


@torch.no_grad()
def _uncount_empty(table, block, size, running_mean):
    """Take a batch without active pixels from those that a module of PyTorch's has just counted."""
    some = table.has_pixels(block, size)
    if some is None or table.model is None:
        return
    counters = table.keep("counters of batches", lambda: _counters(table.model))
    counter = counters.get(id(running_mean))
    if counter is not None:
        key = "empty batches", id(some)
        counter.sub_(table.keep(key, lambda: (~some).to(torch.int64)))


def _counters(model):
    norms = [module for module in model.modules() if isinstance(module, _COUNTING)]
    pairs = ((norm.running_mean, norm.num_batches_tracked) for norm in norms)
    return {id(mean): counter for mean, counter in pairs if counter is not None}
