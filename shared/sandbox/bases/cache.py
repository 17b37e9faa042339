"""Bases as folders: each is unpacked once on a machine, below a service's cache, and removed when it is the one unused longest.

    <cache>/bases/<digest>/root/            the root file system
    <cache>/bases/<digest>/manifest.json    what is known of it
    <cache>/bases/lock                      held while a base is unpacked or removed

Invariants:
- A folder `<digest>` is whole and has that digest: it gets its name when the last file is written and the digest is compared.
- Nobody writes into it afterwards. Sandboxes mount it read-only, or as the lower layer of an overlay.
- One base is unpacked at a time on a machine, however many processes ask.
- A base that a process holds is not removed. The kernel ends the hold with the process, also after `kill -9`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shared.archives import ArchiveError, zstd_pieces
from shared.objects import ObjectDamaged, ObjectMissing, Objects
from shared.sandbox import SandboxUnavailable
from shared.sandbox.bases import store
from shared.sandbox.bases.store import BaseRefused, Manifest
from shared.sandbox.bases.unpack import MAX_BYTES, MAX_FILES, unpack
from shared.scratch import scratch

MOST_BYTES = 20_000_000_000  # of all bases on a machine, where the caller says nothing; as ETUDE_SANDBOX_BASES_GB
_RESERVE = 256 << 20  # bytes of the disk that are left to others
_BLOCK = 4096  # bytes that a file takes at least
_LOCK_S = 1800.0  # another process may be unpacking the largest base from a slow store
_LOCK_AGAIN_S = 0.1
_HOLD_TRIES, _HOLD_AGAIN_S = 50, 0.01
_CHUNK = 1 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(slots=True)
class _Hold:
    descriptor: int
    count: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A base on this machine. `used`: when it was opened last, in seconds since the epoch. `held`: a process has it open."""

    folder: Path
    manifest: Manifest
    used: float
    held: bool

    @property
    def takes(self) -> int:
        """Return about how many bytes of the disk it takes."""
        return _takes(self.manifest)


_holds: dict[Path, _Hold] = {}  # of this process, by `<digest>`
_guard = threading.Lock()
# Calls that wait for an unpacking block neither the quick look-ups nor the loop's own pool.
_lookers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="base-look")
_unpacker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="base-unpack")


async def unpacked(objects: Objects | None, cache: Path, image: str, *, most_bytes: int = MOST_BYTES) -> Path:
    """Return the folder that holds a base's root file system; unpack it first where this machine has not. Nobody may write into
    it. It stays until `release`, or until this process ends.

    `image`: `base:NAME` or `base:DIGEST`. `objects`: None: only bases that this machine has can be opened, by digest.
    `most_bytes`: bases that no process holds are removed, the one unused longest first, until all fit.

    Raises BaseRefused (a ValueError) for a base that does not exist, is of another machine type or too large; SandboxUnavailable
    where the disk is full, the archive damaged or the object store out of reach.
    """
    folder, held = await _result(_lookers.submit(_look, objects, cache, _wanted(image)))
    if not held:
        await _result(_unpacker.submit(_make, objects, folder, most_bytes))
    return folder / "root"


def opened(objects: Objects | None, cache: Path, image: str, *, most_bytes: int = MOST_BYTES) -> Path:
    """Do what `unpacked` does, and block until it is done: for threads, and programs without a loop."""
    folder, held = _look(objects, cache, _wanted(image))
    if not held:
        _make(objects, folder, most_bytes)
    return folder / "root"


def _wanted(image: str) -> str:
    wanted = image.removeprefix(store.PREFIX)
    if wanted == image or not wanted:
        raise BaseRefused(f"image {image!r:.80}: no base; allowed: base:NAME or base:DIGEST; {store.LIST}")
    return wanted


async def _result(work: Future[tuple[Path, bool]]) -> tuple[Path, bool]:
    """Return what the thread does: a base's folder, and whether this process holds it now."""
    try:
        return await asyncio.wrap_future(work)
    except asyncio.CancelledError:  # the thread goes on: what it gets is for nobody
        work.add_done_callback(_let_go)
        raise


def _let_go(work: Future[tuple[Path, bool]]) -> None:
    if not work.cancelled() and not work.exception():
        folder, held = work.result()
        if held:
            release(folder / "root")


def release(root: Path) -> None:
    """Let go of a base once: `root` is what `unpacked` returned. It may be removed then, when room is needed."""
    with _guard:
        hold = _holds.get(root.parent)
        if hold is None:
            return
        hold.count -= 1
        if not hold.count:
            os.close(hold.descriptor)
            del _holds[root.parent]


def manifest_of(root: Path) -> Manifest:
    """Return the manifest of a base; `root` is what `unpacked` returned. Raises OSError, ValueError."""
    return msgspec.json.decode((root.parent / "manifest.json").read_bytes(), type=Manifest)


def kept(cache: Path) -> list[Kept]:
    """Return the bases of this machine, the one unused longest first. Raises OSError."""
    found = []
    for folder in _folders(cache.absolute() / "bases"):
        with contextlib.suppress(OSError, ValueError):  # removed since it was listed
            found.append(Kept(folder, manifest_of(folder / "root"), folder.stat().st_mtime, _is_held(folder)))
    return sorted(found, key=lambda base: base.used)


def trim(cache: Path, most_bytes: int) -> list[Manifest]:
    """Remove bases that no process holds until the rest takes no more than `most_bytes`. Return what was removed. Raises OSError,
    SandboxUnavailable."""
    bases = cache.absolute() / "bases"
    if not bases.is_dir():
        return []
    with _machine_lock(bases):
        return list(_removals(bases, lambda taken: taken > most_bytes))


def _look(objects: Objects | None, cache: Path, wanted: str) -> tuple[Path, bool]:
    """Return where a base is or will be, and whether it is there and held now. Raises BaseRefused, SandboxUnavailable."""
    if objects is None and not store.is_digest(wanted):
        raise BaseRefused(f"base {wanted!r:.80}: this service has no object store to look names up in; give its digest")
    try:
        digest = store.resolve(objects, wanted) if objects else wanted
    except OSError as error:
        raise SandboxUnavailable(f"base {wanted!r}: the object store fails: {error}") from None
    folder = cache.absolute() / "bases" / digest
    return folder, _hold(folder)


def _hold(folder: Path) -> bool:
    """Hold a base for this process. False: it is not there, or is being removed."""
    with _guard:
        if hold := _holds.get(folder):
            hold.count += 1
            return True
        try:
            descriptor = os.open(folder, _FOLDER)
        except FileNotFoundError:
            return False
        # A look at whether it is held (`_is_held`) has the lock for a moment.
        tries = _HOLD_TRIES
        while not (locked := _lock(descriptor, fcntl.LOCK_SH)) and _still(folder, descriptor) and (tries := tries - 1):
            time.sleep(_HOLD_AGAIN_S)
        if not locked or not _still(folder, descriptor):
            os.close(descriptor)
            return False
        _holds[folder] = _Hold(descriptor, 1)
        with contextlib.suppress(OSError):  # another user's cache: it goes by the time of unpacking
            os.utime(descriptor)
        return True


def _lock(descriptor: int, how: int) -> bool:
    """Lock a folder without waiting. False: another process has it. On a file system that cannot lock folders, every base can be
    held, and none counts as free to remove."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return how == fcntl.LOCK_SH
    return True


def _still(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(folder, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _is_held(folder: Path) -> bool:
    descriptor = os.open(folder, _FOLDER)
    try:
        return not _lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def _make(objects: Objects | None, folder: Path, most_bytes: int) -> tuple[Path, bool]:
    """Unpack a base into `folder`, unless another process has, and hold it. Raises as `unpacked`."""
    digest, bases = folder.name, folder.parent
    if objects is None:
        raise BaseRefused(f"base {digest}: is not unpacked here, and this service has no object store to fetch it from")
    try:
        manifest = store.find(objects, digest)
        _require_fitting(manifest)
        bases.mkdir(parents=True, exist_ok=True)
        with _machine_lock(bases):
            if _hold(folder):  # another process was first
                return folder, True
            _make_room(bases, manifest, most_bytes)
            with scratch(bases, "unpacking-") as draft:
                _fetch(objects, manifest, draft)
                (draft / "base").rename(folder)
            if not _hold(folder):
                raise SandboxUnavailable(f"base {digest}: {folder} is gone: something else removes files there")
            return folder, True
    except ArchiveError as error:
        raise SandboxUnavailable(f"base {digest}: its archive is damaged: {error}; {store.MAKE}") from None
    except (ObjectMissing, ObjectDamaged) as error:
        why = "is missing" if isinstance(error, ObjectMissing) else f"is damaged ({error})"
        raise SandboxUnavailable(f"base {digest}: its archive {why}; {store.MAKE}") from None
    except OSError as error:
        if error.errno in _FULL:
            raise SandboxUnavailable(_no_room(bases, f"became full while base {digest} was unpacked")) from None
        raise SandboxUnavailable(f"base {digest}: cannot be unpacked: {error}") from None


def _require_fitting(manifest: Manifest) -> None:
    """Raise BaseRefused for a base that no sandbox on this machine can begin with."""
    if manifest.machine != store.machine():
        raise BaseRefused(
            f"base {manifest.name!r} ({manifest.digest}): its programs are for {manifest.machine}, this machine is "
            f"{store.machine()}; make one on a machine of this type"
        )
    if not 0 <= manifest.size <= MAX_BYTES or not 0 <= manifest.files <= MAX_FILES:
        raise BaseRefused(
            f"base {manifest.name!r} ({manifest.digest}): found {manifest.files} files of {manifest.size} bytes; "
            f"allowed: at most {MAX_FILES} files of {MAX_BYTES} bytes"
        )


def _fetch(objects: Objects, manifest: Manifest, draft: Path) -> None:
    """Fetch and unpack a base into `draft/base`. Raises ArchiveError, OSError, and what the store raises."""
    archive = draft / "archive"
    objects.get_file(manifest.archive, archive)
    root = draft / "base" / "root"
    root.mkdir(parents=True)
    with archive.open("rb") as file:
        tally = unpack(
            zstd_pieces(iter(lambda: file.read(_CHUNK), b"")), root, size=manifest.size, files=manifest.files
        )
    if tally.digest != manifest.digest:
        raise ArchiveError(f"found digest {tally.digest}, expected {manifest.digest}")
    (draft / "base" / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    for made in (root, draft / "base"):  # whatever the umask: another user's sandbox begins here
        made.chmod(0o755)


def _takes(manifest: Manifest) -> int:
    return manifest.size + _BLOCK * manifest.files


def _make_room(bases: Path, manifest: Manifest, most_bytes: int) -> None:
    """Remove bases until this one fits, in the cache and on the disk. Raises SandboxUnavailable where the disk stays too full."""
    coming = _takes(manifest)
    need = coming + manifest.archive.size + _RESERVE

    def too_little(taken: int) -> bool:
        return taken + coming > most_bytes or _lacks(bases, need, manifest.files)

    for _ in _removals(bases, too_little):
        pass
    if _lacks(bases, need, manifest.files):
        raise SandboxUnavailable(
            _no_room(bases, f"base {manifest.digest} needs {need >> 20} MiB and {manifest.files} files")
        )


def _lacks(bases: Path, size: int, files: int) -> bool:
    disk = os.statvfs(bases)
    return disk.f_bavail * disk.f_frsize < size or (disk.f_files > 0 and disk.f_favail < files)


def _no_room(bases: Path, what: str) -> str:
    disk = os.statvfs(bases)
    free = disk.f_bavail * disk.f_frsize >> 20
    return f"the disk of {bases} is too small: {what}; found {free} MiB free; free some, or set ETUDE_STATE to a larger disk"


def _removals(bases: Path, too_much: Callable[[int], bool]) -> Iterator[Manifest]:
    """Remove bases that no process holds, the one unused longest first, as long as `too_much` says so of the bytes that all take.
    The machine lock is held."""
    there = kept(bases.parent)
    taken = sum(base.takes for base in there)
    for base in there:
        if not too_much(taken):
            return
        if _removed(base.folder):
            taken -= base.takes
            yield base.manifest


def _removed(folder: Path) -> bool:
    descriptor = os.open(folder, _FOLDER)
    try:
        if not _lock(descriptor, fcntl.LOCK_EX):
            return False
        with scratch(folder.parent, "removing-") as trash:  # a killed process's goes with the next
            folder.rename(trash / "base")
        return True
    finally:
        os.close(descriptor)


def _folders(bases: Path) -> list[Path]:
    try:
        with os.scandir(bases) as entries:
            return [Path(entry.path) for entry in entries if store.is_digest(entry.name)]
    except FileNotFoundError:
        return []


@contextlib.contextmanager
def _machine_lock(bases: Path) -> Iterator[None]:
    """Hold the lock of this cache. Raises SandboxUnavailable where another process keeps it too long."""
    descriptor = os.open(bases / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise SandboxUnavailable(
                        f"another process has unpacked into {bases} for {_LOCK_S:g} s; end it, or wait"
                    ) from None
                time.sleep(_LOCK_AGAIN_S)
        yield
    finally:
        os.close(descriptor)
