"""An S3 that ignores `If-None-Match`, as older gateways do: MinIO (tests/servers.py) behind a proxy that takes the header out."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import urllib3
from minio.credentials import Credentials
from minio.signer import sign_v4_s3

KEPT = ("content-type", "x-amz-content-sha256")  # of a request's headers, and those that describe the object


@contextmanager
def unconditional(objects: str) -> Iterator[str]:
    """Give the address of the same bucket as `objects` through the proxy. ETUDE_S3_… in the environment are its credentials."""
    bucket, _, server = objects.removeprefix("s3://").partition("@")
    credentials = Credentials(os.environ["ETUDE_S3_ACCESS_KEY"], os.environ["ETUDE_S3_SECRET_KEY"])
    pool = urllib3.PoolManager()

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_any(self) -> None:
            url = f"http://{server}{self.path}"
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {n.lower(): v for n, v in self.headers.items() if n.lower() in KEPT or "-meta-" in n.lower()}
            digest, now = headers["x-amz-content-sha256"], datetime.now(UTC)
            headers |= {"host": server, "x-amz-date": now.strftime("%Y%m%dT%H%M%SZ")}
            headers = sign_v4_s3(
                method=self.command,
                url=urlsplit(url),
                region="us-east-1",
                headers=headers,
                credentials=credentials,
                content_sha256=digest,
                date=now,
            )
            done = pool.request(self.command, url, body=body or None, headers=headers, redirect=False)
            self.send_response(done.status)
            for name, value in done.headers.items():
                if name.lower() not in ("connection", "transfer-encoding", "content-length", "server", "date"):
                    self.send_header(name, value)
            length = done.headers.get("Content-Length") if self.command == "HEAD" else len(done.data)
            self.send_header("Content-Length", str(length or 0))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(done.data)

        do_GET = do_PUT = do_HEAD = do_DELETE = do_any

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        try:
            yield f"s3://{bucket}@127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            pool.clear()
