"""The proxy over streams that are no sockets, with all that a client may send."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

pytest.importorskip("cryptography", reason="the network of sandboxes is an extra: etude[egress]")
pytest.importorskip("h11", reason="the network of sandboxes is an extra: etude[egress]")

from shared.sandbox.contract import Credential, Network
from shared.sandbox.egress import EgressLimits, EgressProxy
from tests.unit.sandbox.test_egress_policy import client_hello

NETWORK = Network(("good.test", "index.test"), (Credential("index.test", "Authorization", "Bearer 0123456789"),))
_HELLOS = {name: client_hello(name) for name in ("good.test", "index.test", "evil.test")}
PIECES = [
    *(
        b"GET ",
        b"POST ",
        b"CONNECT ",
        b"TRACE ",
        b"http://",
        b"https://",
        b"good.test",
        b"index.test",
        b"evil.test",
        b"127.0.0.1",
    ),
    *(
        b":80",
        b":443",
        b":22",
        b"/",
        b"@",
        b"%",
        b"#",
        b" HTTP/1.1\r\n",
        b" HTTP/1.0\r\n",
        b"\r\n",
        b"\r\n\r\n",
        b"\n\n",
        b"\0",
    ),
    *(
        b"Host: good.test\r\n",
        b"Host: evil.test\r\n",
        b"Content-Length: 3\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"abc",
    ),
    *(
        b"0\r\n\r\n",
        b"Connection: upgrade\r\n",
        b"Upgrade: websocket\r\n",
        b"Expect: 100-continue\r\n",
        *_HELLOS.values(),
    ),
    *(
        b"GET http://good.test/ HTTP/1.1\r\nHost: good.test\r\n\r\n",
        b"CONNECT index.test:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    ),
]


class Channel:
    """A writer that an adapter might bring: it keeps what it was given."""

    def __init__(self) -> None:
        self.written, self.closed = b"", False

    def write(self, data: bytes) -> None:
        self.written += data

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def can_write_eof(self) -> bool:
        return False

    def write_eof(self) -> None: ...

    def close(self) -> None:
        self.closed = True


async def sent(proxy: EgressProxy, parts: list[bytes]) -> Channel:
    reader, channel = asyncio.StreamReader(), Channel()
    for part in parts:
        reader.feed_data(part)
    reader.feed_eof()
    await proxy.serve(reader, channel)
    return channel


@settings(max_examples=60)
@given(st.lists(st.sampled_from(PIECES) | st.binary(max_size=8), max_size=14))
def test_no_bytes_break_the_proxy_or_make_it_look_up_a_host_that_is_not_allowed(parts):
    looked_up: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        looked_up.append(host)
        raise OSError("no network in this test")

    async def scenario() -> None:
        proxy = EgressProxy(NETWORK, EgressLimits(head_s=2, idle_s=2), resolve=resolve)
        channel = await sent(proxy, parts)
        assert channel.closed
        assert set(looked_up) <= {"good.test", "index.test"}
        assert not any(decision.allowed for decision in proxy.decisions)
        assert b"0123456789" not in channel.written

    with capture_logs() as logs:
        asyncio.run(scenario())
    assert not [entry for entry in logs if entry["log_level"] in ("error", "critical")]


def test_a_refusal_travels_over_any_pair_of_streams():
    async def scenario() -> None:
        proxy = EgressProxy(NETWORK)
        channel = await sent(proxy, [b"GET http://evil.test/ HTTP/1.1\r\nHost: evil.test\r\n\r\n"])
        assert channel.written.startswith(b"HTTP/1.1 403 ")
        assert channel.written.endswith(b"egress proxy: the host is not in the allow list\n")
        assert [(one.host, one.port, one.allowed) for one in proxy.decisions] == [("evil.test", 80, False)]

    asyncio.run(scenario())


def test_a_proxy_without_credentials_needs_no_certificates():
    assert EgressProxy(Network(("good.test",))).certificates == b""
    given_out = EgressProxy(NETWORK).certificates
    assert given_out.count(b"BEGIN CERTIFICATE") >= 1
    assert b"PRIVATE" not in given_out
