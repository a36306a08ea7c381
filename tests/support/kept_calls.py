"""Which calls are ones that are kept."""


def note_kept(module, monkeypatch):
    """Return a list to which each ``compute_again`` of a module adds whether there was one."""
    found, compute_again = [], module.compute_again

    def noted(*arguments):
        y = compute_again(*arguments)
        found.append(y is not None)
        return y

    monkeypatch.setattr(module, "compute_again", noted)
    return found
