"""The tokens that this console knows: from the settings, or one made at the first start and kept in a file.

Invariant: the file is only its owner's to read (mode 0600) from the moment it exists; one that others can read is refused.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from services.console.access import Person, Role, Tokens
from services.console.config import ConsoleSettings
from shared.contracts.messages import BY_SCHEDULER
from shared.settings import Told

NAME_CHARS = 100


class Unusable(Told, ValueError):
    """A token that cannot be used; the text says which, what was found and what to do, and quotes none."""


def tokens(settings: ConsoleSettings) -> tuple[Tokens, Path | None]:
    """All tokens, and the file that the operator's lies in (None: the settings name it). Raises Unusable."""
    known: dict[Person, str] = {}
    for role, people in ((Role.operator, settings.console_operators), (Role.viewer, settings.console_viewers)):
        known |= {Person(name, role): token.get_secret_value() for name, token in people.items()}
    named, file = settings.console_token.get_secret_value(), None
    if not named and not settings.console_operators:
        file = settings.token_file
        named = kept(file)
    operator = Person("operator", Role.operator)
    if named and operator in known:
        raise Unusable(
            "ETUDE_CONSOLE_OPERATORS names 'operator', whose token is ETUDE_CONSOLE_TOKEN; choose another name"
        )
    if named:
        known[operator] = named
    names = [person.name for person in known]
    for name in names:
        if name == BY_SCHEDULER or not (name.strip() and name.isprintable() and len(name) <= NAME_CHARS):
            raise Unusable(
                f"ETUDE_CONSOLE_OPERATORS, ETUDE_CONSOLE_VIEWERS: found the name {name[:80]!r}; allowed: 1 to {NAME_CHARS} "
                f"printable characters, but not {BY_SCHEDULER!r}, which signs with it"
            )
    if doubled := {name for name in names if names.count(name) > 1}:
        raise Unusable(f"{sorted(doubled)[0]!r} is both an operator and a viewer (ETUDE_CONSOLE_OPERATORS, _VIEWERS)")
    try:
        return Tokens(known), file
    except ValueError as error:
        where = f"{file}: " if file else "ETUDE_CONSOLE_TOKEN, ETUDE_CONSOLE_OPERATORS, ETUDE_CONSOLE_VIEWERS: "
        raise Unusable(f"{where}{error}") from None


def kept(file: Path) -> str:
    """The token in `file`, made there if it is missing. Two consoles that start at once end up with the same one."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = file.with_name(f".{file.name}.{os.getpid()}")
        fresh.unlink(missing_ok=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as sink:
            sink.write(secrets.token_urlsafe(32) + "\n")
        with contextlib.suppress(FileExistsError):  # another one was first: its token counts
            os.link(fresh, file)
        fresh.unlink()
    if file.stat().st_mode & 0o077:
        raise Unusable(
            f"{file}: others may read it (mode {file.stat().st_mode & 0o777:04o}); delete it, a fresh one is made"
        )
    return file.read_text().strip()
