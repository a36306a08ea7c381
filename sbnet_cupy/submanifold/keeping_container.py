"""KeepingContainer: a container that keeps what was computed of it, but for copies."""

import weakref
from dataclasses import fields

from ..core.arrays import ArrayContainer, library_of


class KeepingContainer(ArrayContainer):
    """Base of the dataclasses that keep what was computed of them in ``_kept``.

    Its keys may be identities of other objects, so a copy keeps nothing at first, whether it is
    made by ``copy`` or by ``pickle``. A map of, say, TensorFlow's tensors is always converted to
    the same NumPy map, and results that live on its sites return the caller's own object, so that
    kernel maps that were kept are found again.
    """

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
        if twin is not None and type(twin._arrays()[0]) is type(mapped._arrays()[0]):
            return twin
        ours, theirs = (library_of(each._arrays()[0]) for each in (self, mapped))
        if ours is not None and theirs is not None and ours.native != theirs.native:
            native, foreign = (self, mapped) if ours.native else (mapped, self)
            foreign._kept["twin"], native._kept["twin"] = native, weakref.ref(foreign)
        return mapped
