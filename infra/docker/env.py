"""Writes `.env` for docker compose: `.env.example` with a fresh secret for every empty value. Never overwrites one.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
_EMPTY = re.compile(r"^([A-Z0-9_]+)=$", re.MULTILINE)


def filled(example: str) -> str:
    """Every `NAME=` gets 48 hexadecimal digits: they need no escaping in a URL, a shell or YAML."""
    return _EMPTY.sub(lambda match: f"{match[1]}={secrets.token_hex(24)}", example)


def write(example: Path, target: Path) -> None:
    """Raises FileExistsError: the servers keep the passwords that they were first started with."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(filled(example.read_text()))


if __name__ == "__main__":
    try:
        write(ROOT / ".env.example", ROOT / ".env")
    except FileExistsError:
        sys.exit(
            f"{ROOT / '.env'} exists and was left as it is; servers keep the passwords they were first started with"
        )
    print(f"{ROOT / '.env'} written; only you can read it")
