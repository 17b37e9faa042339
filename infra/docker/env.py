"""Writes `.env` for docker compose: `.env.example` with a fresh secret for every empty value. Where there is one already,
it adds the secrets that a newer release asks for and fills in those that are empty, and leaves all else as it is.

    python3 infra/docker/env.py [--local]      --local: with the images of `make images`, no image registry

Standard library only, and nothing newer than Python 3.6: it runs before anything is installed.
"""

import argparse
import os
import re
import secrets
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
_EMPTY = re.compile(r"^([A-Z0-9_]+)=$", re.MULTILINE)
_FILES = re.compile(r"^#(COMPOSE_FILE=)", re.MULTILINE)


def filled(example: str, local: bool = False) -> str:
    """Every `NAME=` gets 48 hexadecimal digits: they need no escaping in a URL, a shell or YAML. `local`: COMPOSE_FILE, which
    names the images made on this machine, counts."""
    text = _FILES.sub(r"\1", example) if local else example
    return _EMPTY.sub(lambda match: _fresh(match[1]), text)


def _fresh(name: str) -> str:
    return f"{name}={secrets.token_hex(24)}"


def write(example: Path, target: Path, local: bool = False) -> None:
    """Raises FileExistsError: the servers keep the passwords that they were first started with."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(filled(example.read_text(), local))


def complete(example: Path, target: Path) -> "list[str]":
    """Adds the secrets that `target` does not name or leaves empty. Returns their names."""
    text = target.read_text()
    missing = [name for name in _EMPTY.findall(example.read_text()) if not re.search(f"^{name}=.", text, re.MULTILINE)]
    for name in missing:
        text, empty = re.subn(f"^{name}=$", _fresh(name), text, flags=re.MULTILINE)
        if not empty:
            text = text.rstrip("\n") + f"\n{_fresh(name)}\n"
    if missing:
        target.write_text(text)
    return missing


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python3 infra/docker/env.py",
        description="Writes .env for docker compose, or adds to one what a newer release asks for.",
    )
    parser.add_argument("--local", action="store_true", help="with the images of `make images`, no image registry")
    options = parser.parse_args()
    example, target = ROOT / ".env.example", ROOT / ".env"
    try:
        write(example, target, local=options.local)
        print(f"{target} written; only you can read it")
    except FileExistsError:
        added = complete(example, target)
        if added:
            print(f"{target} had no {', '.join(added)}: added; the rest was left as it is")
        else:
            print(f"{target} has all that is needed, and was left as it is")
