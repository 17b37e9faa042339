"""An object store behind an address that fails over: connections made before lead to a server that refuses everything."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shared.objects import ObjectsUnavailable, connect
from tests.address import Address
from tests.servers import need


class Refusing(BaseHTTPRequestHandler):
    """Keeps connections, as a server that has lost its place and answers everybody who is still there."""

    protocol_version = "HTTP/1.1"

    def _refuse(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = _refuse

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def refusing() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_second_try_at_the_latest_reaches_the_server_that_the_address_leads_to_now(
    refusing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = need("ETUDE_OBJECTS")
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    bucket, _, server = found["ETUDE_OBJECTS"].removeprefix("s3://").partition("@")
    port = int(server.rpartition(":")[2])
    address = Address(port)
    try:
        store = connect(f"s3://{bucket}@127.0.0.1:{address.url_port}")
        key = "runs/test-failover/object"
        store.put(key, b"before")
        address.port = refusing
        store._forget()  # or the connection that it keeps leads to the old one
        with pytest.raises(ObjectsUnavailable):
            store.put(key, b"refused")
        address.port = port
        ref = store.put(key, b"after")
        assert store.get(ref) == b"after"
        store.delete(key)
    finally:
        address.close()
