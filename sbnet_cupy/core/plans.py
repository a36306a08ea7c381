"""A bounded dictionary of what is known of calls, for an adapter that does not plan itself."""


class Plans:
    """What is known of the calls of one function, by key."""

    def __init__(self, most=4096):
        self._plans = {}
        self._most = most  # kept; then all are dropped, and made again as needed

    def get(self, key):
        """Return what is kept under ``key``, or None."""
        return self._plans.get(key)

    def keep(self, key, known):
        """Keep ``known`` unless the key is None; return it."""
        if key is not None:
            if len(self._plans) >= self._most:
                self._plans.clear()
            self._plans[key] = known
        return known

    def clear(self):
        """Drop all."""
        self._plans.clear()
