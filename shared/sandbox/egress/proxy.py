"""The proxy of one sandbox. An adapter hands it each connection from the sandbox; everything else happens here.

Invariants:
- A host that the allow list does not name is refused before its name is looked up: a look-up carries data out, too.
- Every request is one decision, at least: in the list and in the log, with its reason and without a credential's value.
- Nothing that a client or a server sends raises out of `serve`.

Where the rest is: policy (names, addresses), tunnel (TLS), exchange (HTTP), headers (credentials).
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import h11
import structlog

from shared.sandbox import SandboxUnavailable
from shared.sandbox.contract import Decision, Network
from shared.sandbox.egress import policy, reach
from shared.sandbox.egress.exchange import Origin, Peer, answer, exchange, head, readable
from shared.sandbox.egress.gate import Failed, Gate, Visit
from shared.sandbox.egress.limits import EgressLimits
from shared.sandbox.egress.policy import Refused
from shared.sandbox.egress.streams import PlainStream, Reader, Stream, Writer
from shared.sandbox.egress.tunnel import open_tunnel

if TYPE_CHECKING:
    from shared.sandbox.egress.authority import Authority

log = structlog.get_logger()


class EgressProxy:
    """Checks every connection of one sandbox, and forwards those that its policy allows.

    `name`: the sandbox's name in the log; the empty string: it has none. `resolve`: looks up a host's addresses.
    `forbidden`: says why an address may not be reached. `trust`: decides which servers' certificates are good; None: as
    on this machine.

    Raises ValueError for a policy that cannot be read, and SandboxUnavailable where credentials need a package that is missing.
    """

    def __init__(
        self,
        network: Network,
        limits: EgressLimits = EgressLimits(),
        *,
        name: str = "",
        resolve: reach.Resolve = reach.system_resolve,
        forbidden: reach.Forbidden = reach.forbidden_here,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        trust = trust or reach.system_trust()
        trust.set_alpn_protocols(["http/1.1"])
        self._gate = Gate(network, limits, name, resolve, forbidden, trust)
        self._authority = _authority(self._gate.guarded) if self._gate.guarded else None
        self._serving: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The decisions so far, oldest first; at most `EgressLimits.requests`."""
        return tuple(self._gate.decisions)

    @property
    def unrecorded(self) -> int:
        """How many requests were refused past the limit of requests, which are in no list."""
        return self._gate.unrecorded

    @property
    def certificates(self) -> bytes:
        """The authorities that programs in the sandbox must trust, as PEM; empty: the usual ones will do."""
        if self._authority is None:
            return b""
        return reach.system_certificates().rstrip() + b"\n" + self._authority.certificate

    async def serve(self, reader: Reader, writer: Writer) -> None:
        """Serve one connection from the sandbox until it ends. Raises nothing; closes the writer."""
        if self._closed:
            writer.close()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()

    async def close(self) -> None:
        """End all connections. Repeating it does nothing."""
        self._closed = True
        tasks = list(self._serving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: Reader, writer: Writer) -> None:
        limits, used, loop = self._gate.limits, self._gate.used, asyncio.get_running_loop()
        client: PlainStream | None = None
        try:
            async with asyncio.timeout(limits.seconds), asyncio.timeout(limits.idle_s) as idle:
                moved = _mover(idle, loop, limits.idle_s)
                client = PlainStream(reader, writer, moved, used.up, used.down)
                await self._visit(Visit(client, moved))
        except asyncio.CancelledError:
            if client is not None:
                client.drop()
            raise
        except TimeoutError:
            log.info("egress connection timed out", sandbox=self._gate.name)
            if client is not None:
                client.drop()
        except OSError:
            pass  # the client went away
        except Exception as error:  # its text and its variables could hold a credential
            at = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{at.filename}:{at.lineno}"
            log.error("egress connection failed", sandbox=self._gate.name, error=type(error).__name__, at=where)
        finally:
            writer.close()

    async def _visit(self, visit: Visit) -> None:
        peer = Peer(visit.client, h11.SERVER, self._gate.limits.head_bytes)
        try:
            if len(self._serving) > self._gate.limits.connections:
                raise Refused(f"over the limit connections: more than {self._gate.limits.connections} at once", 503)
            tunnel = await self._requests(peer, None, visit)
            if tunnel is not None:
                stream, origin = tunnel
                peer = Peer(stream, h11.SERVER, self._gate.limits.head_bytes)
                await self._requests(peer, origin, visit)
                await stream.end()
        except (Refused, Failed) as error:
            if isinstance(error, Refused):
                self._gate.record(visit.host, visit.port, False, error.why)
            else:
                log.info("egress failed", sandbox=self._gate.name, host=visit.host, port=visit.port, why=error.why)
            with contextlib.suppress(Refused):  # over the limit of bytes
                await answer(peer, error.status, f"egress proxy: {error.why}")

    async def _requests(self, peer: Peer, origin: Origin | None, visit: Visit) -> tuple[Stream, Origin] | None:
        """Answer requests until the connection ends (None) or turns into a tunnel for HTTP."""
        limits = self._gate.limits
        while (request := await head(peer, limits.head_s, limits.head_bytes)) is not None:
            if request.method == b"CONNECT" and origin is None:
                return await self._connect(peer, request, visit)
            if not await exchange(peer, request, origin, self._gate, visit):
                return None
            peer.connection.start_next_cycle()
            visit.host, visit.port = "", 0
        return None

    async def _connect(self, peer: Peer, request: h11.Request, visit: Visit) -> tuple[Stream, Origin] | None:
        visit.host, visit.port = readable(request.target)
        if any(name in (b"content-length", b"transfer-encoding") for name, _ in request.headers):
            raise Refused("CONNECT with a body", 400)
        try:
            visit.host, visit.port = policy.authority(request.target.decode("ascii"))
        except ValueError as error:
            raise Refused(f"the host: {error}") from None
        peer.connection.next_event()  # the end of the request: what follows belongs to the tunnel
        visit.client.ahead(bytes(peer.connection.trailing_data[0]))
        established = h11.Response(status_code=200, headers=[], reason=b"Connection established")
        return await open_tunnel(self._gate, visit, self._authority, lambda: peer.send(established))


def _mover(idle: asyncio.Timeout, loop: asyncio.AbstractEventLoop, idle_s: float) -> Callable[[], None]:
    def moved() -> None:
        if not idle.expired():
            idle.reschedule(loop.time() + idle_s)

    return moved


def _authority(hosts: Iterable[str]) -> Authority:
    try:
        from shared.sandbox.egress.authority import Authority
    except ImportError as error:
        raise SandboxUnavailable(
            f"credentials for a sandbox's network need the package cryptography ({error}); pip install 'etude[egress]'"
        ) from None
    return Authority(hosts)
