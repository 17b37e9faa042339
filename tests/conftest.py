"""For all tests: shared fixtures; and how long an example takes on a busy machine says nothing about the code."""

from hypothesis import settings

from tests.servers import platform_stores

__all__ = ["platform_stores"]

settings.register_profile("etude", deadline=None)
settings.load_profile("etude")
