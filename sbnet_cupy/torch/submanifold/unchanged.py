"""Calls of a network that leave it, and what is drawn later, as they were."""

import contextlib

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..network.generators import forked, generator, host_generators

_DROPOUTS = (
    torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d,
    torch.nn.AlphaDropout, torch.nn.FeatureAlphaDropout,
)  # fmt: skip
_DROPOUT_FUNCTIONS = (
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d,
    functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout,
)  # fmt: skip


@contextlib.contextmanager
def evaluated(net):
    """Have a network in evaluation for a while."""
    with _modes_kept(net):
        net.eval()
        yield


class _NoDropout(TorchFunctionMode):
    """Has the functions of dropout return what they are given."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call a function of PyTorch that is none of these."""
        kwargs = kwargs or {}
        if func in _DROPOUT_FUNCTIONS:
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


@contextlib.contextmanager
def unchanged(net, device):
    """Within this calls of a network drop nothing, and change neither it nor what is drawn later.

    Yields what :func:`put_back` does.
    """
    with _modes_kept(net), put_back(net, device) as again, torch.enable_grad(), _NoDropout():
        for module in net.modules():
            if isinstance(module, _DROPOUTS):
                module.eval()
        yield again


@contextlib.contextmanager
def put_back(net, device):
    """Put buffers and generators of random numbers back after calls of a network.

    Yields a function that puts buffers back ahead of another call, and tells whether calls have
    drawn random numbers.
    """
    buffers = [(b, b.clone()) for b in net.buffers()]
    before = _generators(device)

    def again():
        with torch.no_grad():
            for buffer, old in buffers:
                if not torch.equal(buffer, old):
                    buffer.copy_(old)
        return _generators(device) != before

    try:
        with forked(device):
            yield again
    finally:
        again()


def _generators(device):
    """Return the states of all generators of random numbers that a network may draw from."""
    return host_generators(device), bytes(generator(device).numpy())


@contextlib.contextmanager
def _modes_kept(net):
    modes = {module: module.training for module in net.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
