"""KeepingContainer: a container that keeps what was computed of it, but for copies."""

from dataclasses import fields

from ..core.arrays import ArrayContainer


class KeepingContainer(ArrayContainer):
    """Base of the dataclasses that keep what was computed of them in ``_kept``.

    Its keys may be identities of other objects, so a copy keeps nothing at first, whether it is
    made by ``copy`` or by ``pickle``.
    """

    def __getstate__(self):
        return {field.name: getattr(self, field.name) for field in fields(self) if field.init}

    def __setstate__(self, state):
        self.__init__(**state)
