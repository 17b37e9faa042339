"""Who may do what: roles, tokens, sessions, and how many wrong tokens are borne. Pure: every time is an argument, seconds.

Invariants:
- A token is compared with every known one, in constant time: how long it takes says neither whose nor how near it was.
- A right token always passes, so every guess is looked at, and waiting does not slow guessing down. What stands against it is
  the token's length: 256 bits where we make it.
- A session's id is 256 random bits and lives in this process alone: a restart signs everybody out, and so does a new token.
- A session expires `SESSION_S` after the sign-in, used or not. Sessions and remembered failures are bounded in number.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

SESSION_S = 12 * 3600.0  # a working day
SESSIONS = 1000  # the oldest goes
FAILURES = 5  # wrong tokens at once, from one address
FAILURE_S = 12.0  # until one more is borne
FAILURES_ALL = 50  # the same over all addresses together, so that many of them do not help
ADDRESSES = 10_000
LEAST_TOKEN = 16  # characters


class Role(StrEnum):
    viewer = "viewer"  # reads
    operator = "operator"  # reads, and acts on runs


@dataclass(frozen=True, slots=True)
class Person:
    """Whoever holds one of the tokens, by the name that the settings give to it."""

    name: str
    role: Role

    @property
    def may_act(self) -> bool:
        return self.role is Role.operator


class Tokens:
    """`known`: token -> who holds it. Raises ValueError, which never quotes a token, where one is too short or is two people's."""

    def __init__(self, known: Mapping[Person, str]) -> None:
        for person, token in known.items():
            if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
                raise ValueError(
                    f"the token of {person.name!r}: {len(token)} characters; allowed: {LEAST_TOKEN} or more, ASCII, no spaces"
                )
        self._digests = [(_digest(token), person) for person, token in known.items()]
        if len({digest for digest, _ in self._digests}) < len(self._digests):
            raise ValueError("two people have the same token; give each one of their own")

    def holder(self, token: str) -> Person | None:
        digest, found = _digest(token), None
        for known, person in self._digests:
            if hmac.compare_digest(known, digest):
                found = person
        return found


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True, slots=True)
class Session:
    """`form_key` stands in every form that acts: another site can make a browser send the cookie, but cannot read this."""

    person: Person
    form_key: str
    ends: float


class Sessions:
    def __init__(self) -> None:
        self._sessions: OrderedDict[bytes, Session] = (
            OrderedDict()
        )  # by the id's digest: memory holds no cookie's value

    def begin(self, person: Person, now: float) -> str:
        """Returns the id for the cookie."""
        name = secrets.token_urlsafe(32)
        self._sessions[_digest(name)] = Session(person, secrets.token_urlsafe(32), now + SESSION_S)
        while len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)
        return name

    def find(self, name: str, now: float) -> Session | None:
        session = self._sessions.get(_digest(name))
        if session is not None and now >= session.ends:
            del self._sessions[_digest(name)]
            return None
        return session

    def end(self, name: str) -> None:
        self._sessions.pop(_digest(name), None)


class Failures:
    """Leaky buckets, one per address and one for all: `FAILURES` wrong tokens at once, then one every `FAILURE_S`."""

    def __init__(self) -> None:
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()  # address -> (level, at)
        self._all = (0.0, 0.0)

    def wait(self, address: str, now: float) -> float:
        """Seconds until one more wrong token from this address is borne; 0: now."""
        own = _leaked(self._levels.get(address, (0.0, now)), now, 1 / FAILURE_S)
        every = _leaked(self._all, now, FAILURES_ALL / FAILURES / FAILURE_S)
        waits = ((own + 1 - FAILURES) * FAILURE_S, (every + 1 - FAILURES_ALL) * FAILURE_S * FAILURES / FAILURES_ALL)
        return max(0.0, *waits)

    def note(self, address: str, now: float) -> None:
        """One more wrong token."""
        level = _leaked(self._levels.pop(address, (0.0, now)), now, 1 / FAILURE_S)
        self._levels[address] = (level + 1, now)
        self._all = (_leaked(self._all, now, FAILURES_ALL / FAILURES / FAILURE_S) + 1, now)
        while len(self._levels) > ADDRESSES:
            self._levels.popitem(last=False)


def _leaked(bucket: tuple[float, float], now: float, per_s: float) -> float:
    level, at = bucket
    return max(0.0, level - (now - at) * per_s)


def local_path(text: str) -> str:
    """Where to go after signing in: a path of this console, or its beginning where `text` is none (an open redirect)."""
    fine = text.startswith("/") and not text.startswith("//") and "\\" not in text and text.isprintable()
    return text if fine else "/"
