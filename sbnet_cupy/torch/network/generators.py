"""Generators of random numbers, of the host and of a device, and what calls do to them."""

import contextlib
import pickle
import random
import types

import numpy as np
import torch

_SEED = 0x5EED


def host_generators(device):
    """Return the states of the host's generators of random numbers, but that of the device."""
    own = torch.get_rng_state() if device.type == "cuda" else torch.empty(0)
    return pickle.dumps((random.getstate(), np.random.get_state(legacy=False))), bytes(own.numpy())


def generator(device):
    """Return the state of the generator of random numbers of a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_generator(device, state):
    """Set the state of the generator of random numbers of a device."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@contextlib.contextmanager
def forked(device):
    """Within this, the generators of the host and of a device draw; then they are as before."""
    of_python, of_numpy = random.getstate(), np.random.get_state(legacy=False)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextlib.contextmanager
def replayable(device):
    """Raise if a call draws or seeds random numbers as no replay of a CUDA graph would.

    Yields an object of which ``draws`` says afterwards whether the call drew numbers on the device.
    The generators are then as before.
    """
    ours = torch.cuda if device.type == "cuda" else torch
    with forked(device):
        ours.manual_seed(_SEED)
        before, own = host_generators(device), generator(device)
        call = types.SimpleNamespace(draws=False)
        yield call
        if ours.initial_seed() != _SEED:
            raise RuntimeError(
                "the network sets the seed of its random numbers, which replays of a CUDA graph "
                "would not; set it before the call, or call the network itself"
            )
        if host_generators(device) != before:
            raise RuntimeError(
                "the network draws random numbers on the host, which a CUDA graph would draw but "
                "once; draw them on the device, or call the network itself"
            )
        call.draws = not torch.equal(generator(device), own)
