"""What a list of sites was made of: so much of it as tells whether some of that was left out."""

from ..errors import CapacityError

_SOURCES = "sources"  # under which sites keep (count, capacity) of each list before them
_CLEARED = "cleared"  # and how often they were cleared


def note_source(made, source):
    """Note which list new sites were made of, and what is noted of that one; return the sites."""
    made._kept[_SOURCES] = (*source._kept.get(_SOURCES, ()), (source.count, source.capacity))
    return made


def sources_of(coordinates):
    """Return what is noted of the lists that sites were made of, for a copy; () for none."""
    return coordinates._kept.get(_SOURCES, ())


def keep_sources(coordinates, sources):
    """Note what :func:`sources_of` returned for the sites that these are a copy of."""
    if sources:
        coordinates._kept[_SOURCES] = sources


def map_sources(mapped, coordinates, function):
    """Note of a copy of sites what is noted of them, with a function applied to its arrays."""
    sources = coordinates._kept.get(_SOURCES)
    if sources:
        mapped._kept[_SOURCES] = tuple((function(count), rows) for count, rows in sources)
    return mapped


def has_sources(coordinates):
    """Whether it is noted which list sites were made of."""
    return _SOURCES in coordinates._kept


def keep_sources_only(kept):
    """Drop all else that sites keep, and make maps to them that other sites keep stale."""
    sources, times = kept.get(_SOURCES), times_cleared(kept)
    kept.clear()
    kept[_CLEARED] = times + 1
    if sources is not None:
        kept[_SOURCES] = sources


def times_cleared(kept):
    """Return how often all else was dropped: maps to the sites that are older are stale."""
    return kept.get(_CLEARED, 0)


def check_sources(coordinates, is_left_out):
    """Raise if one of the lists that sites were made of had no room for all of its own.

    ``is_left_out``: that is known of them by their status. Waits for the device.
    """
    for count, rows in coordinates._kept.get(_SOURCES, ()):
        if int(count[0]) > rows:
            raise CapacityError(
                f"capacity must be at least the number of sites, got {rows} for {int(count[0])} "
                "sites of a list that these were made of; pass a larger capacity where it was made"
            )
    if is_left_out:
        raise CapacityError(
            "capacity must be at least the number of sites, or of active blocks, got less for a "
            "list that these were made of; pass a larger capacity where it was made"
        )
