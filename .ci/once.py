"""Plugin of pytest: tests that passed in one stage of CI are left out of a later one.

    PYTHONPATH=.ci pytest -p once --once=FILE  # with =, or pytest takes FILE for a test

Tests that FILE lists are left out; those that pass, but were not skipped, are added to it. Tests of
tests/house are never left out: they look at what is installed, which differs from stage to stage.
"""

from pathlib import Path

ALWAYS = "tests/house/"
_passed = []


def pytest_addoption(parser):
    """Add --once."""
    parser.addoption("--once", metavar="FILE", required=True, help="tests that have passed")


def pytest_collection_modifyitems(config, items):
    """Leave out what the file lists."""
    path = Path(config.getoption("once"))
    done = set(path.read_text(encoding="utf-8").splitlines()) if path.exists() else set()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_logreport(report):
    """Note a test that passed."""
    if report.when == "call" and report.passed and not report.nodeid.startswith(ALWAYS):
        _passed.append(report.nodeid)


def pytest_sessionfinish(session):
    """Add to the file; xdist's workers report to the first process, which does it."""
    if not hasattr(session.config, "workerinput"):
        with open(session.config.getoption("once"), "a", encoding="utf-8") as file:
            file.writelines(f"{name}\n" for name in _passed)
