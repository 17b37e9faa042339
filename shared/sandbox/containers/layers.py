"""What the worker asks of a container's layers (shared/sandbox/inside/layer.py): errands over the channel.

Snapshots stay in the sandbox's own volume. A fork alone takes one through this process, in a file without a name.
"""

from __future__ import annotations

import errno
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from shared.sandbox import SandboxUnavailable
from shared.sandbox.archives import Line
from shared.sandbox.channel import Channel, ChannelProgram
from shared.sandbox.containers import volumes
from shared.sandbox.containers.engine import FULL_DISK
from shared.sandbox.inside import frames
from shared.sandbox.inside.layer import MARK

_DIGEST_BYTES = 1 << 28  # a longer file counts as changed


async def fill(channel: Channel, tree: Path, mount: int | None = None) -> None:
    """Put a folder of the host into the work directory, or into the mount of this number, before the places are mounted. Raises
    SandboxUnavailable, ValueError."""
    with tempfile.TemporaryFile() as spool:
        volumes.archive(volumes.entries(tree), spool)
        await _done(channel, {"do": "fill", **({} if mount is None else {"mount": mount})}, _chunks(spool))


async def mount(channel: Channel, *, kept: int | None = None, layer: IO[bytes] | None = None) -> int:
    """Mount the places, empty or with a layer: a snapshot of this sandbox, or what `give` read. Nothing runs meanwhile. Return the
    layer's bytes on the disk. Raises SandboxUnavailable."""
    source = "kept" if kept is not None else "stream" if layer is not None else ""
    order = {"do": "mount", "from": source, "kept": kept or 0}
    return int(await _done(channel, order, _chunks(layer) if layer is not None else ()))


async def keep(channel: Channel, kept: int) -> int:
    """Keep the upper layer under a number. Return its bytes. Raises SandboxUnavailable."""
    return int(await _done(channel, {"do": "keep", "kept": kept}))


async def give(channel: Channel, kept: int, most: int) -> IO[bytes]:
    """Return an archive of a kept layer. Raises ValueError over `most` bytes, SandboxUnavailable."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 the caller closes it
    try:
        await _done(channel, {"do": "give", "kept": kept, "size": most}, take=file.write)
        return file
    except BaseException:
        file.close()
        raise


async def used(channel: Channel) -> int:
    """Return the bytes on the disk of what the sandbox has written. Raises SandboxUnavailable."""
    return int(await _done(channel, {"do": "used"}))


async def base_lines(channel: Channel) -> list[Line]:
    """Return what the work directory began with. Raises SandboxUnavailable."""
    text = await _done(channel, {"do": "lines", "size": _DIGEST_BYTES})
    return [Line(*json.loads(line)) for line in text.splitlines()]


def _chunks(file: IO[bytes]) -> Iterable[bytes]:
    file.seek(0)
    while data := file.read(1 << 20):
        yield data


async def _done(
    channel: Channel,
    order: dict[str, Any],
    data: Iterable[bytes] = (),
    take: Callable[[bytes], object] | None = None,
) -> bytes:
    """Do one errand. Return what it wrote, or give all but MARK to `take`. Raises SandboxUnavailable, ValueError."""
    found, errand = bytearray(), ChannelProgram(channel)
    try:
        await errand.start({"layer": order})
        try:
            for chunk in data:
                await errand.send(chunk)
            await errand.send(b"", end=True)
        except ConnectionError:  # the note says why
            pass
        while part := await errand.receive(frames.WINDOW):
            found += part
            if take is not None and len(found) > len(MARK):
                take(bytes(found[: -len(MARK)]))
                del found[: -len(MARK)]
    finally:
        await errand.kill()
    if not found.endswith(MARK):
        kind, _, text = errand.note.partition(": ")
        if kind == "ValueError":
            raise ValueError(f"{order['do']}: {text}")
        if f"[Errno {errno.ENOSPC}]" in text:
            raise SandboxUnavailable(f"{order['do']}: {FULL_DISK}")
        raise SandboxUnavailable(f"{order['do']}: the sandbox's files could not be had: {errand.note or 'it ended'}")
    return bytes(found[: -len(MARK)])
