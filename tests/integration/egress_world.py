"""Servers on loopback that stand for the internet, and a sandbox without a network but the forwarder's.

127.0.0.2 plays public addresses; 127.0.0.3 plays an address that nothing in a sandbox may reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import ssl
import sys
import tempfile
import zipfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import psutil

from shared.sandbox.bubblewrap import interpreter, program
from shared.sandbox.contract import Credential, Network
from shared.sandbox.egress import EgressLimits, EgressProxy, environment, hello
from shared.sandbox.egress.authority import Authority
from tests.integration import forwarder

PUBLIC, PRIVATE = "127.0.0.2", "127.0.0.3"
FLAG = b"FLAG-of-what-nobody-may-reach"
SECRET = "Bearer s3cr3t-0f-th3-1nd3x-d0-n0t-l34k"
SERVED = (b"good.test", b"index.test", b"rebind.test", b"mixed.test", b"inside.test")
NAMES = {
    "mixed.test": ["127.0.0.4", PRIVATE],  # nothing listens on the first
    "inside.test": [f"::ffff:{PRIVATE}"],
}


def forbidden(address: object) -> str | None:
    return None if str(address) in (PUBLIC, "127.0.0.4") else "a private address"


class World:
    """`http` and the like: ports. `heads`: what servers got. `trust`: the authority of the servers."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.looked_up: dict[str, int] = {}
        self.authority = Authority(["good.test", "index.test", "hidden.test"])
        self.trust = ssl.create_default_context(cadata=self.authority.certificate.decode())
        self.http = self.https = self.untrusted = self.hidden = self.retry = self.banner = 0

    async def resolve(self, host: str, port: int) -> list[str]:
        count = self.looked_up[host] = self.looked_up.get(host, 0) + 1
        if host == "rebind.test":
            return [PUBLIC if count % 2 else PRIVATE]
        return NAMES.get(host, [PUBLIC if host.endswith(".test") else host])

    @property
    def network(self) -> Network:
        ports = (self.http, self.https, self.hidden, self.retry, self.banner)
        allow = [f"good.test:{port}" for port in ports] + [
            f"index.test:{port}" for port in (self.http, self.https, self.untrusted)
        ]
        allow += [f"{name}.test:{self.http}" for name in ("rebind", "mixed", "inside")]
        return Network(tuple(allow), (Credential("index.test", "Authorization", SECRET),))

    def proxy(self, limits: EgressLimits = EgressLimits()) -> EgressProxy:
        return EgressProxy(
            self.network, limits, name="test", resolve=self.resolve, forbidden=forbidden, trust=self.trust
        )

    async def serve_http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A careless server: it believes Content-Length first and any Host."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError), contextlib.closing(writer):
            here = writer.get_extra_info("sockname")[0]
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                lines = head.split(b"\r\n")
                method, path, *_ = lines[0].split(b" ")
                fields = {
                    name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])
                }
                body = await _body(reader, fields)
                if path == b"/ws" or b"upgrade" in fields:
                    await _switched(reader, writer, path)
                    return
                writer.write(self._page(method, path, fields, head, body, here.endswith(PRIVATE)))
                await writer.drain()

    def _page(
        self, method: bytes, path: bytes, fields: dict[bytes, bytes], head: bytes, body: bytes, private: bool
    ) -> bytes:
        status, said, more = b"200 OK", b"hello " + str(len(body)).encode(), b""
        if method == b"TRACE":
            said = head
        elif private or fields.get(b"host", b"").partition(b":")[0] not in SERVED:
            said = FLAG + b" " + fields.get(b"authorization", b"")
        elif path.startswith((b"/simple/", b"/files/")) and fields.get(b"authorization") != SECRET.encode():
            status, said = b"401 Unauthorized", b"no credential"
        elif path == b"/simple/tiny/":
            said, more = b'<a href="/files/tiny-1.0-py3-none-any.whl">tiny</a>', b"Content-Type: text/html\r\n"
        elif path.startswith(b"/files/"):
            said = wheel()
        elif path == b"/echo":
            more = b"X-Echo: " + fields.get(b"authorization", b"") + b"\r\n"
        elif path == b"/large":
            said = b"x" * 1_000_000
        elif path == b"/chunked":
            start = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            return start + b"5\r\nhello\r\n" * 3 + b"0\r\nX-Trailer: " + FLAG + b"\r\n\r\n"
        length = b"Content-Length: " + str(len(said)).encode()
        return b"HTTP/1.1 " + status + b"\r\n" + more + length + b"\r\n\r\n" + (b"" if method == b"HEAD" else said)

    async def serve_hidden(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A TLS server of many names: shows its flag to every handshake that does not readably ask for good.test."""
        with contextlib.closing(writer):
            writer.write(FLAG if await _asks_for(reader) != "good.test" else b"handshake failure")
            await writer.drain()

    async def serve_retry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The same for the second ClientHello, for which it asks."""
        with contextlib.closing(writer):
            await _asks_for(reader)
            hello_retry = b"\3\3" + hello._RETRY + b"\0\x13\1\0\0\0"
            message = b"\2" + len(hello_retry).to_bytes(3, "big") + hello_retry
            writer.write(b"\x16\3\3" + len(message).to_bytes(2, "big") + message)
            writer.write(FLAG if await _asks_for(reader) != "good.test" else b"handshake failure")
            await writer.drain()

    async def serve_banner(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            writer.write(b"SSH-2.0-" + FLAG + b"\r\n")
            await writer.drain()


async def _body(reader: asyncio.StreamReader, fields: dict[bytes, bytes]) -> bytes:
    if b"content-length" in fields:
        return await reader.readexactly(int(fields[b"content-length"]))
    body = b""
    if b"transfer-encoding" in fields:
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    return body


async def _switched(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: bytes) -> None:
    writer.write(b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n")
    if path != b"/ws":
        writer.write(FLAG)
        return
    while data := await reader.read(1000):
        writer.write(b"<" + data + b">")


async def _asks_for(reader: asyncio.StreamReader) -> str:
    data = b""
    try:
        while (found := hello.client_hello(data)) is None:
            if not (more := await reader.read(4096)):
                return ""
            data += more
        return found[0]
    except ValueError:
        return ""  # no name, or a hidden one


def wheel() -> bytes:
    out, info = io.BytesIO(), "tiny-1.0.dist-info"
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("tiny.py", "print('tiny runs')\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", f"tiny.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return out.getvalue()


@contextlib.asynccontextmanager
async def world() -> AsyncIterator[World]:
    made = World()
    async with contextlib.AsyncExitStack() as stack:

        async def start(serve: object, address: str = PUBLIC, port: int = 0, **tls: ssl.SSLContext) -> int:
            server = await asyncio.start_server(serve, address, port, **tls)  # type: ignore[arg-type]
            stack.callback(server.close)
            return int(server.sockets[0].getsockname()[1])

        made.http = await start(made.serve_http)
        await start(made.serve_http, PRIVATE, made.http)
        contexts = {name: made.authority.server(name) for name in ("good.test", "index.test")}

        def chosen(sock: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            sock.context = contexts[name or "good.test"]

        contexts["good.test"].sni_callback = chosen  # type: ignore[assignment]
        made.https = await start(made.serve_http, ssl=contexts["good.test"])
        made.untrusted = await start(made.serve_http, ssl=Authority(["index.test"]).server("index.test"))
        made.hidden = await start(made.serve_hidden)
        made.retry = await start(made.serve_retry)
        made.banner = await start(made.serve_banner)
        yield made


@contextlib.asynccontextmanager
async def listening(serve: object) -> AsyncIterator[Path]:
    """A proxy's socket, as an adapter mounts it into a sandbox."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "egress.sock")
        server = await asyncio.start_unix_server(serve, path)  # type: ignore[arg-type]
        path.chmod(0o666)
        try:
            yield path
        finally:
            server.close()


PORT = 3128  # of the forwarder, in the sandbox's own network namespace
_START = """
python=$1 port=$2; shift 2
"$python" -I /forward.py "$port" /egress.sock >/tmp/ready &
until [ -s /tmp/ready ]; do sleep 0.02; done
exec "$@"
"""


def sandboxed(
    argv: Sequence[str],
    socket: Path,
    certificates: bytes = b"",
    *,
    isolated: bool = True,
    env: dict[str, str] | None = None,
    files: Path | None = None,
) -> tuple[list[str], list[Path]]:
    """Return the bubblewrap command that runs `argv` behind the forwarder, and temporary files to remove.

    `isolated`: False: a careless sandbox, with the host's network."""
    python = interpreter()
    bundle = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115
    bundle.write(certificates)
    bundle.close()
    Path(bundle.name).chmod(0o644)
    arguments = [program(), "--unshare-user-try", "--unshare-pid", "--unshare-ipc", "--die-with-parent", "--clearenv"]
    arguments += ["--unshare-net"] if isolated else []
    for folder in ("/usr", "/bin", "/lib", "/lib64", "/sbin", "/etc/alternatives", sys.base_prefix):
        arguments += ["--ro-bind-try", folder, folder]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--chdir", "/tmp"]
    arguments += ["--ro-bind", forwarder.__file__, "/forward.py", "--bind", str(socket), "/egress.sock"]
    arguments += ["--ro-bind", bundle.name, "/ca.pem"] + (["--ro-bind", str(files), "/files"] if files else [])
    variables = {
        "PATH": "/usr/bin:/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        **environment(PORT, "/ca.pem"),
        **(env or {}),
    }
    for name, value in variables.items():
        arguments += ["--setenv", name, value]
    start = ["/bin/sh", "-c", _START, "sh", str(python), str(PORT if isolated else 0)]
    return [*arguments, *start, *argv], [Path(bundle.name)]


def traces(process: psutil.Process, secret: bytes, files: Sequence[str]) -> set[str]:
    """Return where a secret lies in a process: its environment, arguments, memory, and these files or folders of its root."""
    found, here = set(), Path("/proc", str(process.pid))
    for name in ("environ", "cmdline"):
        if secret in (here / name).read_bytes():
            found.add(name)
    with (here / "mem").open("rb", 0) as memory:
        for line in (here / "maps").read_text().splitlines():
            span, mode, *_ = line.split()
            start, end = (int(part, 16) for part in span.split("-"))
            if "r" not in mode or "[v" in line:
                continue
            with contextlib.suppress(OSError, ValueError, OverflowError):
                memory.seek(start)
                if secret in memory.read(end - start):
                    found.add("memory")
    for place in files:
        path = here / "root" / place
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file() and secret in file.read_bytes():
                found.add("files")
    return found
