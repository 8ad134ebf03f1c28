"""Starts the rank server once, before any test, so that the clean-up after a test does not take it for a stray."""

import pytest

from tests.dist.launch import start_server


@pytest.fixture(scope="session", autouse=True)
def rank_server() -> None:
    """The process that ranks are forked from; it ends with the test process."""
    start_server()
