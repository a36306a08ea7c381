"""KeepingContainer: a container that keeps what was computed of it, but for copies."""

import functools
import operator
import weakref
from dataclasses import fields

from ..core.arrays import ArrayContainer, device_of_all, library_of
from ..core.graph_memory import capture_of, memory_of_graphs

CAPTURE = "capture"


def mark_capture(kept, capture):
    """Note in which capture of a CUDA graph, 0 for none, the owner of ``kept`` was computed."""
    if capture:
        kept[CAPTURE] = capture


def kept_or_made(kept, key, like, make):
    """Return what is kept under a key, or make it and keep it.

    A captured graph computes something when it runs. So what is made in a capture is kept for that
    capture only, unless all of what it is computed of was made in it, too; and what is made later
    of what a graph computes is not kept, because the next run may change it. Of what is made for
    one capture only, the latest is kept, until it is made outside of captures.

    Parameters
    ----------
    kept : dict
    key : hashable
    like : array
        Of the library and device of what is made: it tells the current capture.
    make : function
    """
    found = kept.get(key)
    if found is not None:
        return found
    own, now = kept.get(CAPTURE, 0), capture_of(like)
    if now == own:
        found = kept[key] = _made_for_graph(like, make) if now else make()
        kept.pop((CAPTURE, key), None)
        return found
    if not now:
        return make()
    capture, found = kept.get((CAPTURE, key), (0, None))
    if capture != now:
        found = _made_for_graph(like, make)
        kept[CAPTURE, key] = now, found
    return found


def kept_now(kept, like):
    """Return the keys and values that :func:`kept_or_made` would find, those of a capture too."""
    now, found = capture_of(like), {}
    for key, value in list(kept.items()):  # another thread may add some meanwhile
        if not (isinstance(key, tuple) and key[0] == CAPTURE):
            found[key] = value
        elif value[0] == now:
            found.setdefault(key[1], value[1])
    return found


def _made_for_graph(like, make):
    """Make what a graph computes, in memory that stays its own when nothing else keeps it."""
    library = library_of(like)
    if library is None or not library.native:  # a framework knows what memory its graphs use
        return make()
    with memory_of_graphs(like):
        return make()


class KeepingContainer(ArrayContainer):
    """Base of the dataclasses that keep what was computed of them in ``_kept``.

    Its keys may be identities of other objects, so a copy keeps nothing at first, whether it is
    made by ``copy`` or by ``pickle``, but what :meth:`CoordinateMap.check` tells of lists before.
    A map of, say, TensorFlow's tensors is always converted to the same NumPy map, one of which no
    array changes is no copy, and results that live on its sites return the caller's own object, so
    that kernel maps that were kept are found again.
    """

    @functools.cached_property
    def _device(self):
        """Where the arrays are, which does not change."""
        return device_of_all(self._arrays())

    def _keep(self, key, make):
        """Return what is kept under a key, or make it of the arrays and keep it."""
        return kept_or_made(self._kept, key, self._arrays()[0], make)

    def __getstate__(self):
        return {field.name: getattr(self, field.name) for field in fields(self) if field.init}

    def __setstate__(self, state):
        self.__init__(**state)

    def _mapped(self, function):
        """Return a copy with ``function`` applied to every array held."""
        raise NotImplementedError

    def _map_arrays(self, function):
        twin = self._kept.get("twin")
        twin = twin() if isinstance(twin, weakref.ref) else twin
        if twin is not None and getattr(function, "exports", False):
            return twin
        mapped = self._mapped(function)
        if all(map(operator.is_, mapped._arrays(), self._arrays())):
            return self
        if twin is not None and type(twin._arrays()[0]) is type(mapped._arrays()[0]):
            return twin
        ours, theirs = (library_of(each._arrays()[0]) for each in (self, mapped))
        if ours is None or theirs is None:
            return mapped
        if ours.native and theirs.native:  # a contiguous copy
            self._kept["twin"] = mapped
        elif ours.native != theirs.native:
            native, foreign = (self, mapped) if ours.native else (mapped, self)
            foreign._kept["twin"], native._kept["twin"] = native, weakref.ref(foreign)
        return mapped
