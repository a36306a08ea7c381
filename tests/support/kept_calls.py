"""Which calls are ones that are kept."""


def note_kept(module, otherwise, monkeypatch):
    """Return a list to which each call of a module adds whether it was one that is kept.

    Then ``compute_again`` of the module finds it, else the function of the name ``otherwise``
    computes it.
    """
    found, compute_again, compute = [], module.compute_again, getattr(module, otherwise)

    def noted(*arguments):
        y = compute_again(*arguments)
        if y is not None:
            found.append(True)
        return y

    def computed(*arguments):
        found.append(False)
        return compute(*arguments)

    monkeypatch.setattr(module, "compute_again", noted)
    monkeypatch.setattr(module, otherwise, computed)
    return found
