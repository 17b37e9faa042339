"""Which keys an object may have: the same in every adapter."""

from __future__ import annotations

MAX_BYTES = 1024  # S3's limit


def check(key: str) -> str:
    """Returns `key`. Raises ValueError unless it is a relative path of plain names: no '..', no empty part, no `.tmp`,
    no backslash, no control character, 1024 bytes at most."""
    parts = key.split("/")
    bad = (
        not key
        or len(key.encode("utf-8", "surrogatepass")) > MAX_BYTES
        or any(part in ("", ".", "..", ".tmp") or len(part.encode("utf-8", "surrogatepass")) > 255 for part in parts)
        or any(ord(c) < 32 or c in "\\\x7f" or 0xD800 <= ord(c) < 0xE000 for c in key)
    )
    if bad:
        raise ValueError(
            f"object key: found {key!r}; allowed: names joined by '/', without '.', '..' or control characters"
        )
    return key
