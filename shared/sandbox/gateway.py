"""The way from one sandbox to its egress proxy, over the channel that the adapter has to the loop inside.

    program ── 127.0.0.1:PORT ── loop ══ channel ══ Gateway ── EgressProxy, in this process ── server

Invariants:
- The sandbox has no network interface but its own loopback. The proxy judges every byte that arrives.
- A sandbox sees the certificates of authorities in a folder that it cannot write to, and nothing else of the proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shared.sandbox import SandboxUnavailable
from shared.sandbox.channel import Channel, ChannelProgram
from shared.sandbox.contract import Decision, Network

if TYPE_CHECKING:
    from shared.sandbox.egress import EgressProxy

PORT = 3128
_CERTIFICATES = "certificates.pem"
# Until a program inside takes what was sent. The proxy's own limits are shorter; past this one the sandbox counts as broken.
_TAKEN_S = 86400.0

MakeProxy = Callable[[Network, str], "EgressProxy"]


def possible() -> bool:
    """Return whether the packages of the extra `egress` are here."""
    return all(importlib.util.find_spec(name) is not None for name in ("h11", "idna"))


def check(network: Network) -> None:
    """Raises ValueError for a network that needs a package which is missing."""
    if network.allow and not possible():
        raise ValueError(
            "network: found hosts to allow; a network needs the packages h11 and idna: pip install 'etude[egress]'"
        )


def proxy_of(network: Network, name: str) -> EgressProxy:
    """Raises SandboxUnavailable where a package is missing, ValueError."""
    from shared.sandbox import egress

    return egress.EgressProxy(network, name=name)


class Connection:
    """One connection from inside: reader and writer, as the proxy takes them. Raises ConnectionError where its end is gone."""

    def __init__(self, program: ChannelProgram) -> None:
        self._program = program
        self._waiting = b""
        self._read_last = False
        self._ending: asyncio.Task[None] | None = None

    async def read(self, most: int) -> bytes:
        if self._read_last:
            return b""
        try:
            data = await self._program.receive(most)
        except SandboxUnavailable as error:
            raise ConnectionResetError(str(error)) from None
        self._read_last = not data
        return data

    def write(self, data: bytes) -> None:
        self._waiting += data

    async def drain(self) -> None:
        """Return when the program inside has taken everything, as far as the kernel's own memory does not."""
        data, self._waiting = self._waiting, b""
        if data:
            await self._send(data)

    def can_write_eof(self) -> bool:
        return self._ending is None

    def write_eof(self) -> None:
        """Begin to say that nothing more comes. Everything before was drained."""
        self._ending = asyncio.create_task(self._end())

    def close(self) -> None:
        """Give up what was not drained; `end` closes the connection."""
        self._waiting = b""

    async def end(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
        await self._program.kill()

    async def _end(self) -> None:
        with contextlib.suppress(ConnectionError):
            await self._send(b"", last=True)

    async def _send(self, data: bytes, *, last: bool = False) -> None:
        try:
            await self._program.send(data, end=last, wait_s=_TAKEN_S)
        except SandboxUnavailable as error:
            raise ConnectionResetError(str(error)) from None


class Gateway:
    """One sandbox's proxy. `inside`: where the sandbox sees the folder of `write`."""

    def __init__(self, proxy: EgressProxy, inside: str) -> None:
        from shared.sandbox.egress.environment import environment

        self._proxy = proxy
        self._serving: set[asyncio.Task[None]] = set()
        self.certificates = proxy.certificates
        self.environment = environment(PORT, f"{inside}/{_CERTIFICATES}" if self.certificates else "")

    @property
    def decisions(self) -> Sequence[Decision]:
        return self._proxy.decisions

    def write(self, folder: Path) -> None:
        """Write the certificates into a folder of the host, if there are any. Raises OSError."""
        if self.certificates:
            (folder / _CERTIFICATES).write_bytes(self.certificates)
            (folder / _CERTIFICATES).chmod(0o644)

    async def open(self, channel: Channel, port: int = PORT) -> int:
        """Let the loop listen, before code has run inside, and serve what connects. Return the port. Raises SandboxUnavailable."""
        channel.arrived = self._arrived
        answer, _ = await channel.ask({"do": "listen", "port": port})
        return int(answer["port"])

    async def close(self) -> None:
        await self._proxy.close()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(set(self._serving))

    def _arrived(self, program: ChannelProgram) -> None:
        task = asyncio.create_task(self._serve(Connection(program)))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: Connection) -> None:
        try:
            await self._proxy.serve(connection, connection)
        finally:
            await connection.end()
