"""A sandbox whose only network is the egress proxy. Each attack first succeeds against a careless proxy."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.patience import patient

pytest.importorskip("cryptography", reason="the network of sandboxes is an extra: etude[egress]")
pytest.importorskip("h11", reason="the network of sandboxes is an extra: etude[egress]")

from shared.sandbox.bubblewrap import interpreter
from shared.sandbox.egress import EgressProxy
from tests.integration.egress_world import FLAG, PRIVATE, SECRET, World, listening, sandboxed, traces, world
from tests.unit.sandbox.test_egress_policy import client_hello, with_extension

PYTHON = str(interpreter())
pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="bwrap is not installed")


class Careless:
    """A proxy as one might write it in an hour: it refuses the texts of bad addresses, and copies the rest."""

    REFUSED = (PRIVATE, "localhost")

    def __init__(self, made: World) -> None:
        self._resolve, self._credentials = made.resolve, made.network.credentials

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError), contextlib.closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            method, target, *_ = head.split(b" ")
            url = urlsplit(("//" if method == b"CONNECT" else "") + target.decode())
            host, port = url.hostname or "", url.port or 80
            if host in self.REFUSED or (await self._resolve(host, port))[0] in self.REFUSED:
                writer.write(b"HTTP/1.1 403 Forbidden\r\n\r\n")
                return
            server = await self._connected(host, port)
            if method == b"CONNECT":
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            else:
                server[1].write(self._with_credential(head.replace(target, (url.path or "/").encode(), 1)))
            await asyncio.gather(_copy(reader, server[1]), _copy(server[0], writer))

    async def _connected(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        for address in await self._resolve(host, port):
            with contextlib.suppress(OSError):
                return await asyncio.open_connection(address, port)
        raise ConnectionError

    def _with_credential(self, head: bytes) -> bytes:
        for one in self._credentials:
            if b"Host: " + one.host.encode() in head:
                return head[:-2] + f"{one.header}: {one.value}\r\n\r\n".encode()
        return head


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.closing(writer):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


def attacks(made: World) -> dict[str, list[bytes]]:
    """name -> what a client sends, part by part, each after an answer. Success: the flag or the credential comes back."""
    port = made.http

    def get(url: str, host: str = "", more: str = "Connection: close\r\n", method: str = "GET") -> list[bytes]:
        return [f"{method} {url} HTTP/1.1\r\nHost: {host or urlsplit(url).netloc}\r\n{more}\r\n".encode()]

    def connect(target: str, *parts: bytes) -> list[bytes]:
        return [f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode(), *parts]

    inner = f"GET / HTTP/1.1\r\nHost: other.test:{port}\r\n\r\n".encode()
    good, hidden = f"good.test:{port}", f"good.test:{made.hidden}"
    number = int(ipaddress.IPv4Address(PRIVATE))
    spellings = ("127.3", str(number), hex(number), "0177.0.0.3", "0x7f.0.0x0.3", f"[::ffff:{PRIVATE}]")
    tests = {f"the address as {text}": get(f"http://{text}:{port}/") for text in spellings}
    tests |= {f"a tunnel to {text}": connect(f"{text}:{port}", inner) for text in spellings}
    tests |= {
        "another host": get(f"http://other.test:{port}/"),
        "a tunnel to another host": connect(f"other.test:{port}", inner),
        "a name that begins alike": get(f"http://good.test.other.test:{port}/"),
        "a name that ends alike": get(f"http://notgood.test:{port}/"),
        "user information": get(f"http://good.test:{port}@other.test:{port}/", f"other.test:{port}"),
        "a name that leads inside": get(f"http://inside.test:{port}/"),
        "a name that leads inside at the second look-up": get(f"http://rebind.test:{port}/"),
        "a name that also leads inside": get(f"http://mixed.test:{port}/"),
        "another Host header": get(f"http://{good}/", f"other.test:{port}"),
        "another Host header in a tunnel": connect(good, inner),
        "a second request for another host": [get(f"http://{good}/", more="")[0] + inner],
        "a request in the body": [
            get(f"http://{good}/", "", "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", "POST")[0]
            + b"0\r\n\r\n"
            + inner
        ],
        "an upgrade": get(f"http://{good}/upgrade", "", "Connection: upgrade, close\r\nUpgrade: raw\r\n"),
        "another TLS name": connect(hidden, client_hello("hidden.test")),
        "no TLS name": connect(hidden, client_hello(None)),
        "an encrypted TLS name": connect(hidden, with_extension(client_hello("good.test"), 0xFE0D, b"x" * 64)),
        "another TLS name at the second hello": connect(
            f"good.test:{made.retry}", client_hello("good.test"), client_hello("hidden.test")
        ),
        "another protocol": connect(f"good.test:{made.banner}", b"SSH-2.0-x\r\n\r\n"),
        "TRACE": get(f"http://index.test:{port}/", method="TRACE"),
        "a response that echoes the credential": get(f"http://index.test:{port}/echo"),
        "the credential for another host": get(f"http://good.test:{port}/echo", f"index.test:{port}"),
    }
    return tests


_DRIVER = """
import base64, concurrent.futures, json, socket, sys
port = int(open("/tmp/ready").read().split()[1])
given = json.load(sys.stdin)

def attack(parts):
    got = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=given["patience_s"]) as s:
            for left, part in zip(reversed(range(len(parts))), parts):
                s.sendall(base64.b64decode(part))
                while piece := s.recv(65536):
                    got += piece
                    if left or any(mark.encode() in got for mark in given["marks"]):
                        break
    except OSError as error:
        got += repr(error).encode()
    return base64.b64encode(got).decode()

def direct(where):
    try:
        with socket.create_connection(tuple(where), timeout=3) as s:
            s.sendall(b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
            return base64.b64encode(s.recv(1000)).decode()
    except OSError as error:
        return base64.b64encode(repr(error).encode()).decode()

with concurrent.futures.ThreadPoolExecutor(40) as pool:
    answers = dict(zip(given["attacks"], pool.map(attack, given["attacks"].values())))
answers["no proxy at all"] = direct(given["direct"])
print(json.dumps(answers))
"""


async def run(argv: Sequence[str], socket: Path, certificates: bytes = b"", stdin: bytes = b"", **how: bool) -> bytes:
    command, leftovers = sandboxed(argv, socket, certificates, **how)
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={}
        )
        out, _ = await process.communicate(stdin)
        return out
    finally:
        for path in leftovers:
            path.unlink()


async def attacked(made: World, serve: object, *, isolated: bool) -> dict[str, bytes]:
    encoded = {name: [base64.b64encode(part).decode() for part in parts] for name, parts in attacks(made).items()}
    given = json.dumps(
        {
            "attacks": encoded,
            "marks": [FLAG.decode(), SECRET],
            "direct": [PRIVATE, made.http],
            "patience_s": patient(20.0),
        }
    ).encode()
    async with listening(serve) as socket:
        out = await run([PYTHON, "-I", "-c", _DRIVER], socket, stdin=given, isolated=isolated)
    assert out.startswith(b"{"), out.decode()
    return {name: base64.b64decode(text) for name, text in json.loads(out).items()}


def won(answer: bytes) -> bool:
    return FLAG in answer or SECRET.encode() in answer


def test_every_attack_succeeds_against_a_careless_proxy_and_none_against_ours():
    async def scenario() -> None:
        async with world() as made:
            careless = await attacked(made, Careless(made).serve, isolated=False)
            assert not {name: answer for name, answer in careless.items() if not won(answer)}
            made.looked_up.clear()
            proxy = made.proxy()
            ours = await attacked(made, proxy.serve, isolated=True)
            await proxy.close()
            assert not {name: answer for name, answer in ours.items() if won(answer)}
            assert len(ours) == len(careless) >= 30
            refused = [decision for decision in proxy.decisions if not decision.allowed]
            echo = [decision for decision in proxy.decisions if decision.host == "index.test" and decision.allowed]
            # The others are no requests that a proxy must refuse. Without a proxy there is no network; the name that moves is
            # connected to where it was first; the upgrade and the echo are answered without what they wanted.
            assert len(refused) == len(ours) - 4, sorted((one.host, one.why) for one in refused)
            assert all(one.why for one in proxy.decisions)
            assert echo
            assert "other.test" not in made.looked_up, "a refused name is not even looked up"
            assert SECRET not in repr(proxy.decisions)

    asyncio.run(scenario())


# Programs as they are


_CLIENTS = """
set -u
echo "== curl http"; curl -s http://good.test:$1/
echo; echo "== curl https"; curl -s https://good.test:$2/
echo; echo "== curl https with credential"; curl -s -D - https://index.test:$2/echo
echo; echo "== curl http with credential"; curl -s -D - -H 'Authorization: mine' http://index.test:$1/echo
echo; echo "== curl upload"; head -c 300000 /dev/zero | curl -s -H 'Expect: 100-continue' -T - https://index.test:$2/
echo; echo "== curl head"; curl -sI http://good.test:$1/
echo; echo "== curl chunked"; curl -s http://good.test:$1/chunked
echo; echo "== curl refused"; curl -s https://other.test:$2/ -o /dev/null -w '%{http_connect}'
echo; echo "== curl address"; curl -s http://127.0.0.3:$1/ --noproxy ''
echo; echo "== python https"
"$3" -I -c "import urllib.request; print(urllib.request.urlopen('https://good.test:$2/').read().decode())"
echo "== curl with an untrusted server"; curl -s https://index.test:$4/echo
echo; echo "== python without the certificate"
"$3" -I -c "import ssl, urllib.request as u; u.urlopen('https://index.test:$2/', context=ssl.SSLContext(16))" 2>&1 | tail -1
echo "== python https with credential"
"$3" -I -c "import urllib.request; print(urllib.request.urlopen('https://index.test:$2/echo').headers['x-echo'])"
"""


def test_programs_reach_allowed_hosts_and_get_an_answer_when_refused():
    async def scenario() -> None:
        async with world() as made:
            proxy = made.proxy()
            trusted = proxy.certificates + made.authority.certificate
            async with listening(proxy.serve) as socket:
                argv = ["/bin/bash", "-c", _CLIENTS, "sh", str(made.http), str(made.https), PYTHON, str(made.untrusted)]
                out = (await run(argv, socket, trusted)).decode()
            await proxy.close()
            said = dict(part.split("\n", 1) for part in out.split("== ")[1:])
            assert said["curl http"] == "hello 0\n", out
            assert said["curl https"] == "hello 0\n", out
            assert "x-echo: [removed]" in said["curl https with credential"]
            assert "x-echo: [removed]" in said["curl http with credential"]
            assert said["curl upload"] == "hello 300000\n"
            assert "content-length: 7" in said["curl head"]
            assert said["curl chunked"] == "hellohellohello\n"
            assert said["curl refused"] == "403\n"
            assert "egress proxy: the host: an IP address" in said["curl address"]
            assert "certificate verify failed" in said["curl with an untrusted server"]
            assert "certificate verify failed" in said["python without the certificate"]
            assert said["python https"] == "hello 0\n"
            assert said["python https with credential"] == "[removed]\n"
            assert SECRET not in out
            got = [
                head
                for head in made.heads
                if f"authorization: {SECRET}".encode() in head.lower().replace(b"bearer", b"Bearer")
            ]
            assert len(got) == 4, "the server of the credential got it each time, and got no other"
            assert not any(b"mine" in head for head in made.heads)
            allowed = [(one.host, one.port) for one in proxy.decisions if one.allowed]
            assert allowed.count(("index.test", made.https)) == 3
            refused = {one.host: one.why for one in proxy.decisions if not one.allowed}
            assert refused.pop("other.test") == "the host is not in the allow list"
            assert refused.pop(f"127.0.0.3:{made.http}") == "the host: an IP address; names only"
            assert "the sandbox's certificate" in refused.pop("index.test")
            assert not refused

    asyncio.run(scenario())


def test_pip_installs_from_an_index_whose_credential_it_never_sees():
    if subprocess.run([PYTHON, "-c", "import pip"], capture_output=True, check=False).returncode:
        pytest.skip("the interpreter has no pip")

    async def scenario() -> None:
        async with world() as made:
            proxy = made.proxy()
            async with listening(proxy.serve) as socket:
                index = f"https://index.test:{made.https}/simple/"
                pip = [
                    PYTHON,
                    "-m",
                    "pip",
                    "install",
                    "-q",
                    "--no-cache-dir",
                    "--disable-pip-version-check",
                    "--retries",
                    "0",
                ]
                script = '"$@" && cd /tmp/here && exec "$0" -c "import tiny"'
                argv = ["/bin/sh", "-c", script, PYTHON, *pip, "--index-url", index, "--target", "/tmp/here", "tiny"]
                out = await run(argv, socket, proxy.certificates)
            await proxy.close()
            assert out.endswith(b"tiny runs\n"), out.decode()

    asyncio.run(scenario())


# The credential


FILES = ("tmp", "dev/shm", "ca.pem", "forward.py", "files")
_HOLDER = """
import ssl, sys, urllib.request
kept = [urllib.request.urlopen(f"https://index.test:{sys.argv[2]}/echo"), urllib.request.urlopen(f"http://index.test:{sys.argv[1]}/echo")]
text = [(one.read(), str(one.headers)) for one in kept]
open("/tmp/answers", "w").write(repr(text))
print("holding", flush=True)
sys.stdin.read()
"""


async def scanned(made: World, proxy: EgressProxy, secret: bytes, env: dict[str, str], files: Path | None) -> set[str]:
    async with listening(proxy.serve) as socket:
        trusted = proxy.certificates + made.authority.certificate
        argv = [PYTHON, "-c", _HOLDER, str(made.http), str(made.https)]
        command, leftovers = sandboxed(argv, socket, trusted, env=env, files=files)
        process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={})
        try:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"holding\n"
            inside = psutil.Process(process.pid).children(recursive=True)
            assert len([one for one in inside if "python" in one.name()]) >= 2, "the forwarder and the client"
            return set().union(*(traces(one, secret, FILES) for one in inside))
        finally:
            await process.communicate(b"")
            for path in leftovers:
                path.unlink()


def test_a_scan_finds_the_credential_nowhere_in_the_sandbox(tmp_path):
    secret = SECRET.split(" ")[1].encode()
    given = tmp_path / "given"
    given.mkdir(mode=0o755)
    (given / "token").write_bytes(secret)

    async def scenario() -> None:
        async with world() as made:
            proxy = made.proxy()
            careless = await scanned(made, proxy, secret, {"TOKEN": SECRET}, given)
            assert careless >= {"environ", "memory", "files"}, "the scan sees what a sandbox is given"
            before = len(made.heads)
            assert await scanned(made, proxy, secret, {}, None) == set()
            await proxy.close()
            assert all(secret in head for head in made.heads[before:]), "both requests carried it"
            assert len(made.heads) == before + 2

    asyncio.run(scenario())
