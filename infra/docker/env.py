"""Writes `.env` for docker compose: `.env.example` with a fresh secret for every empty value. Never overwrites one.

    python3 infra/docker/env.py [--local]      --local: with the images of `make images`, no image registry

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
_FILES = re.compile(r"^#(COMPOSE_FILE=)", re.MULTILINE)


def filled(example: str, local: bool = False) -> str:
    """Every `NAME=` gets 48 hexadecimal digits: they need no escaping in a URL, a shell or YAML. `local`: COMPOSE_FILE, which
    names the images made on this machine, counts."""
    text = _FILES.sub(r"\1", example) if local else example
    return _EMPTY.sub(lambda match: f"{match[1]}={secrets.token_hex(24)}", text)


def write(example: Path, target: Path, local: bool = False) -> None:
    """Raises FileExistsError: the servers keep the passwords that they were first started with."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(filled(example.read_text(), local))


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--local"]):
        sys.exit(f"found {sys.argv[1:]}; allowed: --local, or nothing")
    try:
        write(ROOT / ".env.example", ROOT / ".env", local=sys.argv[1:] == ["--local"])
    except FileExistsError:
        sys.exit(
            f"{ROOT / '.env'} exists and was left as it is; servers keep the passwords they were first started with"
        )
    print(f"{ROOT / '.env'} written; only you can read it")
