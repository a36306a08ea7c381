"""What vmap does to an operation on blocks: the images of all members become one batch."""

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

_LIST = ("bin_counts", "active_block_indices")
_JOINED = ("x", "base", "blocks")  # arrays of which those of all members become one


def batch_members(function, names):
    """Return a function of arrays with these names, which vmap turns into a call on more images.

    It gives blocks from images, or images. Members that have tables or weights of their own run
    one after another.
    """
    mapped = custom_vmap(function)
    from_images = "blocks" not in names and "base" not in names  # to blocks

    @mapped.def_vmap
    def rule(size, batched, *arrays):
        given = dict(zip(names, arrays, strict=True))
        own = {name for name, is_mapped in zip(names, batched, strict=True) if is_mapped}
        if own - {*_JOINED, *_LIST}:
            return one_by_one(mapped, batched, arrays), True
        n = given["x"].shape[int("x" in own)]
        shared = from_images and "x" not in own  # the images, among all members
        lists = [given[name] for name in _LIST]
        are_mapped = [name in own for name in _LIST]
        given |= zip(_LIST, one_list(size, are_mapped, *lists, n, 0 if shared else n), strict=True)
        for name in _JOINED:
            if given.get(name) is not None and not shared:
                given[name] = spread(size, name in own, given[name])
        result = mapped(*given.values())
        return result.reshape(size, result.shape[0] // size, *result.shape[1:]), True

    return mapped


def spread(size, is_mapped, array):
    """Return ``size`` arrays ``[N, ...]``, mapped or all the same, as one ``[size * N, ...]``."""
    if not is_mapped:
        array = jnp.broadcast_to(array, (size, *array.shape))
    return array.reshape(size * array.shape[1], *array.shape[2:])


def one_list(size, mapped, counts, indices, images, step):
    """Return the lists of all members as one: image n of member i becomes ``n + step * i``.

    Rows past a member's count, and those that name none of its ``images``, become -1: operations
    pass over them. So the count of the whole is that of all rows.
    """
    counts = counts if mapped[0] else jnp.broadcast_to(counts, (size, 1))
    indices = indices if mapped[1] else jnp.broadcast_to(indices, (size, *indices.shape))
    rows = indices.shape[1]
    n = indices[..., 0]
    there = (jnp.arange(rows, dtype=jnp.int32) < counts) & (n >= 0) & (n < images)
    n = jnp.where(there, n + step * jnp.arange(size, dtype=jnp.int32)[:, None], -1)
    indices = indices.at[..., 0].set(n).reshape(size * rows, 3)
    return jnp.full(1, size * rows, jnp.int32), indices


def jit_one_by_one(function):
    """Return a function of arrays, with one result, jitted; ``vmap`` calls it for each member."""
    mapped = custom_vmap(function)

    @mapped.def_vmap
    def rule(size, batched, *arrays):
        return one_by_one(mapped, batched, arrays), True

    return jax.jit(mapped)


def one_by_one(function, mapped, args):
    """Call a function once for each member of the mapped axis."""
    over = [array for array, is_mapped in zip(args, mapped, strict=True) if is_mapped is True]

    def member(own):
        own = iter(own)
        return function(
            *(next(own) if is_mapped is True else array
              for array, is_mapped in zip(args, mapped, strict=True))
        )  # fmt: skip

    return jax.lax.map(member, over)
