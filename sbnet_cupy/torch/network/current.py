"""What belongs to the call that runs in a thread."""

import contextlib
import threading


class Current(threading.local):
    """A value that each thread has for itself, None outside of :meth:`set_to`."""

    value = None

    @contextlib.contextmanager
    def set_to(self, value):
        """Return a context in which the thread has a value; those around it have theirs again."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before
