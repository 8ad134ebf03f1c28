"""Starts the rank server once, before any test, so that the clean-up after a test does not take it for a stray."""

import pytest

from tests.dist.launch import start_server

# Files of more than a minute or two. Files are handed out in order: a long one at the end would leave a core idle.
LONG = {f"test_{name}.py" for name in ("auto", "cache", "conformance", "examples", "inductor", "pipelines", "tuning")}


@pytest.fixture(scope="session", autouse=True)
def rank_server() -> None:
    """The process that ranks are forked from; it ends with the test process."""
    start_server()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files go first, except where each day begins with another file."""
    if config.getoption("--minutes") is None:
        items.sort(key=lambda item: item.path.name not in LONG)
