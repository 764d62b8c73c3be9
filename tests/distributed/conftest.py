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
