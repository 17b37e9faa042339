"""HTTP/1.1 between the sandbox and a server. Both sides are parsed and written again by h11; no byte of a head is copied.

Invariants:
- The host that was allowed, the host that is connected to and the `Host` that the server reads are the same.
- One request per connection to a server: a request that hides in another one's body reaches no server as a request.
- A credential is added after everything that the client says about header fields has been applied.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import h11

from shared.sandbox.contract import Credential
from shared.sandbox.egress import headers as fields
from shared.sandbox.egress import policy
from shared.sandbox.egress.gate import Failed, Gate, Visit
from shared.sandbox.egress.policy import Refused
from shared.sandbox.egress.streams import PlainStream, Stream, relay, run_with

_ABSOLUTE = re.compile(r"([a-z][a-z0-9+.-]*)://([^/?#]*)([^#]*)", re.IGNORECASE)
_PIECE = (
    256  # bytes that a piece of a body counts for in addition to its own: tiny pieces cost the worker more than bytes
)
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the requests of a tunnel go."""

    scheme: str
    host: str
    port: int


class Peer:
    """One end of an HTTP connection."""

    def __init__(self, stream: Stream, role: Any, head_bytes: int) -> None:
        self.stream = stream
        self.connection = h11.Connection(role, max_incomplete_event_size=head_bytes)

    async def event(self) -> Any:
        """Return the next event. Raises h11.RemoteProtocolError."""
        while (event := self.connection.next_event()) is h11.NEED_DATA:
            self.connection.receive_data(await self.stream.read())
        return event

    async def send(self, event: Any) -> None:
        if data := self.connection.send(event):
            await self.stream.write(data)
            await asyncio.sleep(0)  # thousands of tiny pieces in one buffer must not hold up the worker's other work


async def head(peer: Peer, limit_s: float, most_bytes: int) -> h11.Request | None:
    """Return the next request, or None at the end. Raises Refused for a slow, large or broken one."""
    try:
        event = peer.connection.next_event()
        if event is h11.NEED_DATA:
            peer.connection.receive_data(await peer.stream.read())
            async with asyncio.timeout(limit_s):
                event = await peer.event()
    except TimeoutError:
        raise Refused(f"over the limit head_s: the request's head took more than {limit_s:g} s", 408) from None
    except h11.RemoteProtocolError as error:
        raise Refused(f"not HTTP/1.1: {error}"[:200], error.error_status_hint) from None
    if not isinstance(event, h11.Request):
        return None
    # h11 holds only a head that is incomplete to its limit.
    size = len(event.method) + len(event.target) + sum(len(name) + len(value) + 4 for name, value in event.headers)
    if size > most_bytes:
        raise Refused(f"over the limit head_bytes: more than {most_bytes} bytes of head", 431)
    return event


def target(request: h11.Request, origin: Origin | None) -> tuple[Origin, bytes]:
    """Return where a request goes and the path there. `origin`: of the tunnel that it came through; None: no tunnel.

    Raises Refused for all that two readers could understand in two ways.
    """
    names, text = fields.names(request.headers), request.target.decode("ascii")
    if b"content-length" in names and b"transfer-encoding" in names:
        raise Refused("Content-Length and Transfer-Encoding in one request", 400)
    if b"transfer-encoding" in names and request.http_version != b"1.1":
        raise Refused("Transfer-Encoding in a request that is not HTTP/1.1", 400)
    if request.method.upper() in (b"TRACE", b"TRACK", b"CONNECT"):
        # TRACE shows a credential in the body of its answer.
        raise Refused("the method; allowed: all but TRACE and TRACK, and CONNECT outside of a tunnel", 405)
    if origin is None:
        if (parts := _ABSOLUTE.fullmatch(text)) is None:
            raise Refused("no absolute URL; allowed: 'http://host/path', or CONNECT", 400)
        scheme, where, path = parts.groups()
        if scheme.lower() != "http":
            raise Refused("the URL's scheme; allowed: 'http', and CONNECT for TLS", 400)
        origin = Origin("http", *_authority(where, 80))
        path = path if path.startswith("/") else "/" + path
    elif text.startswith("/") and "#" not in text:
        path = text
    else:
        raise Refused("the request's target; allowed in a tunnel: a path", 400)
    for said in (value.decode("latin-1") for name, value in request.headers if name == b"host"):
        if _authority(said, _PORTS[origin.scheme]) != (origin.host, origin.port):
            raise Refused("the Host header names another host than the request")
    if origin.scheme == "http" and origin.port == 443:
        raise Refused("plain HTTP to port 443", 400)
    return origin, path.encode()


def _authority(text: str, default_port: int) -> tuple[str, int]:
    try:
        return policy.authority(text, default_port)
    except ValueError as error:
        raise Refused(f"the host: {error}") from None


async def exchange(peer: Peer, request: h11.Request, origin: Origin | None, gate: Gate, visit: Visit) -> bool:
    """Answer one request. Return whether the connection can take another one. Raises Refused, Failed."""
    visit.host, visit.port = readable(request.target) if origin is None else (origin.host, origin.port)
    goal, path = target(request, origin)
    visit.host, visit.port = goal.host, goal.port
    websocket = _websocket(request)
    admission = await gate.admit(goal.host, goal.port)
    credentials = gate.credentials(goal.host)
    added = "".join(f"; adds the header {credential.header}" for credential in credentials)
    gate.record(goal.host, goal.port, True, f"allowed by {admission.rule.text!r}{added}")
    stream = await gate.connect(admission, visit, tls=goal.scheme == "https")
    try:
        server = Peer(stream, h11.CLIENT, gate.limits.head_bytes)
        host = goal.host if goal.port == _PORTS[goal.scheme] else f"{goal.host}:{goal.port}"
        headers = fields.request_headers(list(request.headers), host.encode(), credentials, websocket)
        try:
            await server.send(h11.Request(method=request.method, target=path, headers=headers))
            switched = await run_with(_response(peer, server, credentials, gate), _body(peer, server, gate))
        except h11.RemoteProtocolError as error:
            raise Failed(f"{goal.host} answered no HTTP/1.1: {error}"[:200]) from None
        except OSError as error:
            raise Failed(f"the connection to {goal.host} ended: {type(error).__name__}") from None
        if switched:
            await _raw(peer, server, stream)
    finally:
        stream.drop()
    ended = peer.connection.our_state is h11.DONE and peer.connection.their_state is h11.DONE
    return ended and not switched


def readable(target: bytes) -> tuple[str, int]:
    """Return the host and port of a target as far as they can be read, for the list and the log; port 0: it cannot be read.

    Paths and user information stay out of both.
    """
    text = target.decode("ascii", "replace")
    where = parts[2] if (parts := _ABSOLUTE.fullmatch(text)) else text.partition("?")[0]
    try:
        return policy.authority(where, 80 if parts else None)
    except ValueError:
        return where.rpartition("@")[2][:200], 0


def _websocket(request: h11.Request) -> bool:
    names = fields.names(request.headers)
    if b"websocket" not in fields.tokens(request.headers, b"upgrade") or request.http_version != b"1.1":
        return False  # the request goes without its Upgrade
    if request.method != b"GET" or b"transfer-encoding" in names or b"content-length" in names:
        raise Refused("a WebSocket upgrade with a body or by another method than GET", 400)
    return b"upgrade" in fields.tokens(request.headers, b"connection")


async def _body(peer: Peer, server: Peer, gate: Gate) -> None:
    """Send the request's body to the server. A server that stops reading may still answer."""
    if peer.connection.they_are_waiting_for_100_continue:
        await peer.send(h11.InformationalResponse(status_code=100, headers=[]))
    while True:
        try:
            event = await peer.event()
        except h11.RemoteProtocolError as error:
            raise Refused(f"a broken body: {error}"[:200], 400) from None
        if isinstance(event, h11.Data):
            gate.used.up(_PIECE)
            piece: Any = h11.Data(data=bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            piece = h11.EndOfMessage()  # trailers stay here
        else:
            raise Refused("a body that ends early", 400)
        try:
            await server.send(piece)
        except OSError:
            return
        if isinstance(event, h11.EndOfMessage):
            return


async def _response(peer: Peer, server: Peer, credentials: list[Credential], gate: Gate) -> bool:
    """Copy the response to the client. Return whether the server switched to WebSocket."""
    while True:
        event = await server.event()
        if isinstance(event, h11.InformationalResponse):
            if event.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
                continue  # Early Hints and the like
            headers = fields.response_headers(list(event.headers), credentials)
            headers += [(b"connection", b"upgrade"), (b"upgrade", b"websocket")]
            await peer.send(h11.InformationalResponse(status_code=101, headers=headers))
            return True
        if isinstance(event, h11.Response):
            headers = fields.response_headers(list(event.headers), credentials)
            # The reason is left out: it is free text that could show a credential.
            await peer.send(h11.Response(status_code=event.status_code, headers=headers))
        elif isinstance(event, h11.Data):
            gate.used.down(_PIECE)
            await peer.send(h11.Data(data=bytes(event.data)))
        elif isinstance(event, h11.EndOfMessage):
            await peer.send(h11.EndOfMessage())
            return False
        else:
            raise Failed("the server ended the connection without an answer")


async def _raw(peer: Peer, server: Peer, stream: PlainStream) -> None:
    """Copy what follows a switch of protocols."""
    peer.stream.ahead(bytes(peer.connection.trailing_data[0]))
    stream.ahead(bytes(server.connection.trailing_data[0]))
    await relay(peer.stream, stream)


async def answer(peer: Peer, status: int, text: str) -> None:
    """Answer with an error, where no response has begun."""
    if peer.connection.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return
    body = f"{text}\n".encode()
    headers = [("content-type", "text/plain"), ("content-length", str(len(body))), ("connection", "close")]
    try:
        await peer.send(h11.Response(status_code=status, headers=headers))
        await peer.send(h11.Data(data=body))
        await peer.send(h11.EndOfMessage())
    except h11.LocalProtocolError:
        pass  # a HEAD has no body
