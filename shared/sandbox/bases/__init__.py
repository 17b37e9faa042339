"""Bases: root file systems for sandboxes, as objects that are named by their content (docs/sandboxes.md, "Bases").

`make` packs one, `store` keeps it, `unpacked` gives a worker its folder:

    root = await bases.unpacked(objects, cache, "base:bookworm-py312")
    try:
        …  # mount it read-only, or as the lower layer of an overlay
    finally:
        bases.release(root)
"""

from shared.sandbox.bases.cache import MOST_BYTES, kept, manifest_of, opened, release, trim, unpacked
from shared.sandbox.bases.held import Held
from shared.sandbox.bases.store import BaseRefused, Manifest

__all__ = [
    "MOST_BYTES",
    "BaseRefused",
    "Held",
    "Manifest",
    "kept",
    "manifest_of",
    "opened",
    "release",
    "trim",
    "unpacked",
]
