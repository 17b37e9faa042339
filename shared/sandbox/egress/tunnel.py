"""CONNECT: TLS to the named host and to no other, or HTTP inside.

Invariants:
- Before a byte reaches a server, a TLS client has named the host that it asked the proxy for, readably. A second ClientHello
  (TLS 1.3) is held to the same.
- TLS to a host with a credential ends at the proxy. All other TLS passes through unread.
- Nothing but TLS and HTTP/1.1 passes.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from shared.sandbox.egress import hello
from shared.sandbox.egress.exchange import Origin
from shared.sandbox.egress.gate import Gate, Visit
from shared.sandbox.egress.policy import Refused
from shared.sandbox.egress.streams import PlainStream, Stream, TlsStream, relay

if TYPE_CHECKING:
    from shared.sandbox.egress.authority import Authority


async def open_tunnel(
    gate: Gate, visit: Visit, authority: Authority | None, established: Callable[[], Awaitable[None]]
) -> tuple[Stream, Origin] | None:
    """Serve a tunnel to the visit's host. Return the stream and the origin if HTTP comes through it; None: it has ended.

    `established` tells the client that it may begin. Raises Refused, Failed.
    """
    client, host, port = visit.client, visit.host, visit.port
    admission = await gate.admit(host, port)
    guarded = bool(gate.credentials(host))
    # Connect first, so that a failure has a status. A host with a credential gets a connection for each request.
    server = None if guarded else await gate.connect(admission, visit, tls=False)
    try:
        await established()
        first = await _first(client, gate.limits.head_s)
        if first[0] != hello.HANDSHAKE:
            client.ahead(first)
            return client, Origin("http", host, port)
        try:
            data = await _client_hello(client, first, host, gate.limits.head_s)
            if guarded:
                assert authority is not None
                client.ahead(data)
                return await _terminated(client, authority.server(host), gate.limits.head_s), Origin(
                    "https", host, port
                )
            gate.record(host, port, True, f"allowed by {admission.rule.text!r}")
            assert server is not None
            await server.write(data)
            await _server_hello(client, server, host, gate.limits.head_s)
        except Refused:
            await client.write(hello.ACCESS_DENIED)
            raise
        await relay(client, server)
        return None
    finally:
        if server is not None:
            server.drop()


async def _first(client: PlainStream, limit_s: float) -> bytes:
    try:
        async with asyncio.timeout(limit_s):
            data = await client.read()
    except TimeoutError:
        raise Refused(f"nothing came through the tunnel in {limit_s:g} s; allowed: TLS and HTTP/1.1") from None
    except OSError:  # the client went away: that is a decision, too
        data = b""
    if not data:
        raise Refused("nothing came through the tunnel; allowed: TLS and HTTP/1.1")
    return data


async def _enough(stream: PlainStream, data: bytes, done: Callable[[bytes], object], limit_s: float) -> bytes:
    """Read on until `done` returns something other than None. Raises Refused for what it does not accept."""
    try:
        async with asyncio.timeout(limit_s):
            while done(data) is None:
                if not (more := await stream.read()):
                    raise ConnectionError
                data += more
    except TimeoutError:
        raise Refused(f"over the limit head_s: the TLS handshake took more than {limit_s:g} s") from None
    except OSError:
        raise Refused("a TLS handshake that ends early") from None
    except ValueError as error:
        raise Refused(str(error)) from None
    return data


async def _client_hello(client: PlainStream, data: bytes, host: str, limit_s: float) -> bytes:
    """Return the bytes of a ClientHello for `host`; what came behind it is read next. Raises Refused."""
    data = await _enough(client, data, hello.client_hello, limit_s)
    found = hello.client_hello(data)
    assert found is not None
    name, size = found
    if name != host:
        raise Refused(f"the TLS handshake asks for {name[:200]!r}, which is not the host of the tunnel")
    client.ahead(data[size:])
    return data[:size]


async def _server_hello(client: PlainStream, server: PlainStream, host: str, limit_s: float) -> None:
    """Pass the server's first answer on, and a second ClientHello if that asks for one."""
    data = await server.read()  # a slow server is within the idle limit
    if not data:
        return
    data = await _enough(server, data, hello.asks_again, limit_s)
    await client.write(data)
    if not hello.asks_again(data):
        return
    data = b""
    while True:
        data = await _enough(client, data, _whole_record, limit_s)
        size = hello.record_size(data)
        assert size is not None
        if data[0] == hello.HANDSHAKE:
            await server.write(await _client_hello(client, data, host, limit_s))
            return
        await server.write(data[:size])  # early data, or a change of cipher that means nothing in TLS 1.3
        data = data[size:]


def _whole_record(data: bytes) -> bool | None:
    size = hello.record_size(data)
    return None if size is None or len(data) < size else True


async def _terminated(client: PlainStream, context: ssl.SSLContext, limit_s: float) -> TlsStream:
    stream = TlsStream(client, context)
    try:
        async with asyncio.timeout(limit_s):
            await stream.handshake()
    except TimeoutError:
        raise Refused(f"over the limit head_s: the TLS handshake took more than {limit_s:g} s") from None
    except ssl.SSLError as error:
        reason = f"the client refused the sandbox's certificate, or cannot speak TLS 1.2: {error.reason or error}"
        raise Refused(reason[:200]) from None
    except OSError:
        raise Refused("the client ended the TLS handshake: does it trust the sandbox's certificate?") from None
    return stream
