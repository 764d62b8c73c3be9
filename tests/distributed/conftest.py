"""Processes that the tests of a session share."""

import pytest

from .launch import Ranks


@pytest.fixture(scope="session")
def two_ranks():
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def three_ranks():
    ranks = Ranks(3)
    yield ranks
    ranks.stop()


def pytest_terminal_summary(terminalreporter):
    """How long the slowest job took to end after one of its processes had failed."""
    seconds = [
        (value, report.nodeid)
        for report in terminalreporter.stats.get("passed", [])
        for name, value in getattr(report, "user_properties", ())
        if name == "seconds to end" and report.when == "call"
    ]
    if seconds:
        longest, test = max(seconds)
        terminalreporter.write_line(f"longest time to end after a failure: {longest:.1f} s, {test}")
