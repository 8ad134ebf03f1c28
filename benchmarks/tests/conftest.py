"""What these tests share with those of the package: one thread, no network, and no process left behind."""

from tests.conftest import no_strays

__all__ = ["no_strays"]
