"""Decides each request of one sandbox, records the decision, and opens the connection that it allows."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from shared.sandbox.contract import Credential, Decision, Network
from shared.sandbox.egress import network as networks
from shared.sandbox.egress import reach
from shared.sandbox.egress.limits import EgressLimits, Used
from shared.sandbox.egress.policy import Policy, Refused, Rule
from shared.sandbox.egress.streams import PlainStream

log = structlog.get_logger()
_LOOKUPS = 4  # at once, of one sandbox


class Failed(Exception):
    """An allowed request did not reach its server. `status`: the HTTP status that the client gets."""

    def __init__(self, why: str, status: int = 502) -> None:
        super().__init__(why)
        self.why, self.status = why, status


@dataclass(slots=True)
class Visit:
    """One connection from the sandbox. `host`, `port`: what its latest request asked for, as far as it could be read."""

    client: PlainStream
    moved: Callable[[], None]
    host: str = ""
    port: int = 0


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that may go out. `addresses` have been checked; the connection goes to one of them."""

    rule: Rule
    host: str
    port: int
    addresses: tuple[str, ...]


class Gate:
    def __init__(
        self,
        network: Network,
        limits: EgressLimits,
        name: str,
        resolve: reach.Resolve,
        forbidden: reach.Forbidden,
        trust: ssl.SSLContext,
    ) -> None:
        self.limits, self.used = limits, Used(limits)
        self.decisions: list[Decision] = []
        self.unrecorded = 0
        self.name = name
        self._policy, self._resolve, self._forbidden = Policy(network.allow), resolve, forbidden
        self._trust, self._looking_up = trust, asyncio.Semaphore(_LOOKUPS)
        self._credentials: dict[str, list[Credential]] = {}
        for credential in map(networks.check, network.credentials):
            self._credentials.setdefault(credential.host, []).append(credential)

    @property
    def guarded(self) -> tuple[str, ...]:
        """The hosts that get a credential."""
        return tuple(self._credentials)

    def credentials(self, host: str) -> list[Credential]:
        return self._credentials.get(host, [])

    def record(self, host: str, port: int, allowed: bool, why: str) -> None:
        """Append a decision to the list and the log. Past the limit of requests, only count it."""
        if len(self.decisions) >= self.limits.requests:
            self.unrecorded += 1
            return
        self.decisions.append(Decision(time.time(), host, port, allowed, why))
        log.info("egress", sandbox=self.name, host=host, port=port, allowed=allowed, why=why)

    async def admit(self, host: str, port: int) -> Admission:
        """Check a request's host and the addresses behind it. Raises Refused."""
        if len(self.decisions) >= self.limits.requests:
            raise Refused(f"over the limit requests: more than {self.limits.requests}", 429)
        rule = self._policy.permit(host, port)  # before any look-up: a look-up carries data out, too
        try:
            async with asyncio.timeout(self.limits.connect_s), self._looking_up:
                found = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise Refused(f"the name cannot be looked up: {_text(error)}", 502) from None
        return Admission(rule, host, port, reach.checked(found, self._forbidden))

    async def connect(self, admission: Admission, visit: Visit, *, tls: bool) -> PlainStream:
        """Connect to the server, and verify its certificate if `tls`. Raises Failed."""
        try:
            reader, writer = await reach.connect(
                admission.addresses,
                admission.port,
                self.limits.connect_s,
                self._trust if tls else None,
                admission.host,
            )
        except OSError as error:
            raise Failed(f"no connection to {admission.host}:{admission.port}: {_text(error)}") from None
        return PlainStream(reader, writer, visit.moved)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]
