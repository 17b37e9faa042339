"""Packages that a test installs for itself: `forget` before and after, for what a process has loaded once it keeps."""

from __future__ import annotations

import sys

from shared import terms
from shared.environments import tools


def forget(*modules: str) -> None:
    """Let go of all tools and terms that were found or loaded, and of these modules: the next test may bring others of the
    same names, or none."""
    for name in modules:
        sys.modules.pop(name, None)
    for kept in (tools.names, tools.load, terms.names, terms.load):
        kept.cache_clear()
