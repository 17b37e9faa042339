"""Fixtures for all tests."""

from tests.servers import platform_stores

__all__ = ["platform_stores"]
