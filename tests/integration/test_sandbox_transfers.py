"""Hostile archives into a sandbox, and hostile trees out of it. Only files and folders may cross, within the caps.

The naive sandbox, which unpacks and packs whatever it finds, lets each of them through.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.sandbox.contract import Caps
from tests.integration.sandbox_attacks import (
    LIMITS,
    ROOT,
    World,
    adapters,
    once,
    python,
    world_of,
)
from tests.patience import patient

EVIL = b"evil"
LATE_S = 60.0  # an attempt that takes longer hangs
Members = list[tuple[tarfile.TarInfo, bytes]]


def member(name: str, data: bytes = EVIL, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> Members:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    info.size = len(data) if kind == tarfile.REGTYPE else 0
    info.devmajor, info.devminor = 1, 3  # of /dev/null: nothing happens where one is made
    return [(info, data)]


def packed(members: Members, form: int = tarfile.GNU_FORMAT) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=form) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return target.getvalue()


def renamed_by_header() -> bytes:
    info = member("harmless")[0][0]
    info.pax_headers = {"path": "../renamed-@token@"}
    return packed([(info, EVIL)], tarfile.PAX_FORMAT)


def sparse(folder: Path) -> bytes:
    """A terabyte in a kilobyte."""
    with open(folder / "sparse", "wb") as file:
        file.truncate(1 << 40)
    try:
        return subprocess.run(
            ["tar", "--sparse", "--format=gnu", "-C", str(folder), "-cf", "-", "sparse"],
            capture_output=True,
            check=True,
        ).stdout
    finally:
        (folder / "sparse").unlink()


@dataclass(frozen=True, slots=True)
class Archive:
    """`make`: gives the archive; names in it say `@token@` and `@folder@`. `before`: a script that prepares the work directory.
    `at`: where it is unpacked."""

    name: str
    make: Callable[[World], bytes]
    before: str = ""
    at: str = ""
    able: bool = True


def archive(name: str, *parts: Members, before: str = "", at: str = "", able: bool = True) -> Archive:
    def make(world: World) -> bytes:
        for part in parts:
            for info, _ in part:
                info.name, info.linkname = world.text(info.name), world.text(info.linkname)
        return packed([one for part in parts for one in part])

    return Archive(name, make, before, at, able)


LINK, HARD, FIFO, CHARACTERS, BLOCKS = (
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.FIFOTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
)
OUTSIDE = "@folder@/outside"
ARCHIVES = [
    archive("a link", member("put/link", kind=LINK, link="@folder@/secret")),
    archive("a link to nothing", member("put/nothing", kind=LINK, link="../../none")),
    archive("a file through a link", member("put", kind=LINK, link=OUTSIDE), member("put/evil")),
    archive("a hard link", member("put/hard", kind=HARD, link="@folder@/secret")),
    archive(
        "a hard link to a link",
        member("put/a", kind=LINK, link="@folder@/secret"),
        member("put/b", kind=HARD, link="put/a"),
    ),
    archive("a FIFO", member("put/fifo", kind=FIFO)),
    archive("a character device", member("put/device", kind=CHARACTERS), able=ROOT),
    archive("a block device", member("put/block", kind=BLOCKS), able=ROOT),
    archive("the folder above", member("../evil-@token@")),
    archive("the folder above and down again", member("put/../../evil-@token@"), before="mkdir put"),
    archive("an absolute name", member(f"{OUTSIDE}/evil")),
    archive("an absolute name with two slashes", member(f"/{OUTSIDE}/evil")),
    archive(
        "a long name of dots",
        member("put/" + "x/" * 50 + "../" * 52 + "evil-@token@"),
        before="mkdir -p put/$(printf 'x/%.0s' $(seq 50))",
    ),
    Archive(
        "a name in a second header", lambda world: renamed_by_header().replace(b"@token@", world.token[:7].encode())
    ),
    archive("through a link of the task", member("road/evil"), before=f"ln -sfn {OUTSIDE} road"),
    archive("into a link of the task", member("evil"), before=f"ln -sfn {OUTSIDE} place", at="place"),
    archive("over a link of the task", member("file"), before=f"ln -sfn {OUTSIDE}/evil file"),
    archive(
        "over a hard link of the task",
        member("over/secret"),
        before="mkdir -p over; ln -sfn @folder@/outside/evil over/secret",
    ),
    archive("set user id", member("put/program", mode=0o4755)),
    archive("the grader's files", member("tests.py"), at="@grader@"),
    Archive("a bomb", lambda world: gzip.compress(packed(member("put/bomb", bytes(LIMITS.disk_mb + 30 << 20))), 1)),
    Archive("a terabyte of holes", lambda world: sparse(world.folder)),
]
CLEAN = "chmod -R u+rwx put tree over road place 2>/dev/null; rm -rf put tree file over road place sparse nothing"
# What came in that is no file or folder, or more than there may be; and what can be seen of the outside.
LOOK = """
import stat
seen = 0
for top, folders, files in os.walk('.'):
    for name in folders + files:
        info = os.lstat(os.path.join(top, name))
        seen += info.st_size
        own = top.startswith('./over') or name in ('road', 'place', 'file')  # links that the task itself has made
        if not (own or stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)):
            hole(name)
        if stat.S_ISREG(info.st_mode) and info.st_nlink > 1:
            hole('hard link', name)
        if info.st_mode & 0o6000:
            hole('set user id', name)
if seen > %d << 20:
    hole('bytes', seen)
"""


@pytest.fixture(scope="module")
def naive() -> Iterator[World]:
    with world_of("naive") as world:
        yield world


@pytest.fixture(scope="module", params=adapters())
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with world_of(request.param) as world:
        yield world


async def came_in(world: World, one: Archive) -> list[str]:
    """Return what an archive brought about that it must not."""
    outside = world.folder / "outside"
    outside.mkdir(mode=0o777, exist_ok=True)
    outside.chmod(0o777)
    before = _state(world)
    await once(world.mine, f"{CLEAN}; {world.text(one.before)}")
    data = one.make(world)
    try:
        async with asyncio.timeout(patient(LATE_S)):
            await world.mine.put(data, world.text(one.at))
    except (ValueError, OSError, tarfile.TarError) as error:
        refused = f"{type(error).__name__}: {error}"
    else:
        refused = ""
    found = [
        line
        for line in (await once(world.mine, python(LOOK % LIMITS.disk_mb))).stdout.decode().splitlines()
        if "HOLE" in line
    ]
    if _state(world) != before:
        found.append(f"the host: {_state(world)}")
    await once(world.mine, CLEAN)
    shutil.rmtree(outside)
    for path in world.folder.glob("*evil*"):
        path.unlink()
    for path in world.folder.glob("renamed*"):
        path.unlink()
    (world.grader / "tests.py").write_text("the tests\n")
    return [*found, refused] if found else []


def _state(world: World) -> str:
    places = [world.folder, world.folder / "outside", world.grader]
    return (
        repr([sorted(path.name for path in place.iterdir()) for place in places])
        + (world.grader / "tests.py").read_text()
    )


IDS = [one.name.replace(" ", "-") for one in ARCHIVES]


@pytest.mark.parametrize("one", ARCHIVES, ids=IDS)
def test_a_hostile_archive_gets_into_the_naive_sandbox(naive: World, one: Archive) -> None:
    if not one.able:
        pytest.skip("this host cannot show it")
    assert naive.runner.run(came_in(naive, one))


@pytest.mark.parametrize("one", ARCHIVES, ids=IDS)
def test_a_hostile_archive_brings_nothing_about(world: World, one: Archive) -> None:
    assert world.runner.run(came_in(world, one)) == []


SMALL = Caps(1 << 20, 100)


@dataclass(frozen=True, slots=True)
class Tree:
    """`script`: makes it. `paths`: what is asked for. `control`: the script for the naive sandbox; empty: the same."""

    name: str
    script: str
    paths: tuple[str, ...] = ("tree",)
    control: str = ""
    caps: Caps = SMALL
    changes: bool = True  # also by `changes`


TREES = [
    Tree("a link", "ln -s @folder@/secret tree/link"),
    Tree("a link by its name", "ln -s @folder@/secret tree/link", ("tree/link",), changes=False),
    Tree("a folder that is a link", "ln -s @folder@ tree/link", ("tree/link/secret",), changes=False),
    Tree("an absolute path", ":", ("@folder@/secret",), changes=False),
    Tree("the folder above", ":", ("../secret",), changes=False),
    Tree("the folder above and down again", ":", ("tree/../../secret",), changes=False),
    Tree("the root of a process", ":", ("/proc/@loop_pid@/root@folder@/secret",), changes=False),
    Tree("a FIFO", "mkfifo tree/fifo"),
    Tree("a FIFO by its name", "mkfifo tree/fifo", ("tree/fifo",), changes=False),
    Tree("an endless device", ":", ("/dev/zero",), changes=False),
    Tree("a terminal", ":", ("/dev/tty", "/dev/null"), changes=False),
    Tree(
        "a socket",
        python("os.chdir('tree'); socket.socket(socket.AF_UNIX).bind('socket'); os.symlink('socket', 'link')"),
    ),
    Tree("a device", "mknod tree/device c 1 3 || mkfifo tree/device"),
    Tree(
        "a terabyte of holes",
        "truncate -s 1T tree/sparse || truncate -s 1G tree/sparse",
        control="truncate -s 2M tree/sparse",
    ),
    Tree("many files", "for n in $(seq 300); do : > tree/$n; done"),
    Tree("many bytes", "head -c 3000000 /dev/urandom > tree/file"),
    Tree("set user id", ": > tree/program; chmod 6755 tree/program"),
]
# Nothing of these may cross or harm: the naive sandbox fails at some in its own way, or does well.
STRAINS = [
    Tree("deep folders", python("os.chdir('tree')\nfor n in range(400): os.mkdir('d' * 100); os.chdir('d' * 100)")),
    Tree(
        "deeper folders than Python recurses",
        python("os.chdir('tree')\nfor n in range(3000): os.mkdir('d'); os.chdir('d')"),
    ),
    Tree(
        "thousands of long names",
        python("for n in range(5000): os.close(os.open('tree/%0200d' % n, os.O_CREAT))"),
    ),
    Tree(
        "odd names",
        python(
            "for name in (b'a\\nb', b'\\xff\\xfe', b'-rf', b'*', b' ', b'\\x1b[2J', b'x' * 255): open(b'tree/' + name, 'w').close()"
        ),
    ),
    Tree("unreadable files", "echo x > tree/a; mkdir tree/b; echo x > tree/b/c; chmod 000 tree/a tree/b"),
    Tree(
        "extended attributes",
        python("""
open('tree/file', 'w').close()
for name in ('user.overlay.opaque', 'user.overlay.redirect', 'user.overlay.metacopy', 'user.overlay.origin', 'user.x'):
    for path in ('tree', 'tree/file'):
        try: os.setxattr(path, name, b'y')
        except OSError: pass
"""),
    ),
    Tree("names that differ in case", "echo 1 > tree/A; echo 2 > tree/a"),
    Tree("whiteouts", "mknod tree/.wh.file c 0 0; : > tree/.wh.secret; : > tree/.wh..wh..opq"),
]


async def crossed(world: World, tree: Tree) -> list[str]:
    """Return what came out of a sandbox that must not, or how asking for it went wrong."""
    await once(world.mine, f"{CLEAN}; mkdir tree")
    await once(world.mine, world.text(tree.control if world.naive and tree.control else tree.script))
    found = []
    try:
        async with asyncio.timeout(patient(LATE_S)):
            data = await world.mine.get([world.text(path) for path in tree.paths], tree.caps)
        found = _unfit(world, data, tree.caps)
    except (ValueError, FileNotFoundError):
        pass
    except (OSError, RecursionError, tarfile.TarError, TimeoutError) as error:
        found = [f"get: {type(error).__name__}: {error}"]
    if tree.changes:
        try:
            async with asyncio.timeout(patient(LATE_S)):
                changes = await world.mine.changes(tree.caps)
            found += _unfit(world, changes.written, tree.caps)
        except ValueError:
            pass
        except (OSError, RecursionError, tarfile.TarError, TimeoutError) as error:
            found.append(f"changes: {type(error).__name__}: {error}")
    await once(
        world.mine,
        CLEAN,
    )
    return found


def _unfit(world: World, data: bytes, caps: Caps) -> list[str]:
    found = ["the secret"] if world.secret.encode() in data else []
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = tar.getmembers()
    for info in members:
        if not (info.isreg() or info.isdir()) or info.mode & 0o7000:
            found.append(f"{info.name}: type {info.type!r}, mode {stat.filemode(info.mode)}")
        if info.name.startswith("/") or ".." in info.name.split("/"):
            found.append(info.name)
    if sum(info.size for info in members) > caps.size or sum(info.isreg() for info in members) > caps.files:
        found.append(f"over the caps: {len(members)} files, {len(data)} bytes")
    return found


def tree_ids(trees: list[Tree]) -> list[str]:
    return [tree.name.replace(" ", "-") for tree in trees]


@pytest.mark.parametrize("tree", TREES, ids=tree_ids(TREES))
def test_a_hostile_tree_gets_out_of_the_naive_sandbox(naive: World, tree: Tree) -> None:
    try:
        assert naive.runner.run(crossed(naive, tree))
    finally:
        naive.end_left()


@pytest.mark.parametrize("tree", [*TREES, *STRAINS], ids=tree_ids([*TREES, *STRAINS]))
def test_a_hostile_tree_does_not_get_out(world: World, tree: Tree) -> None:
    assert world.runner.run(crossed(world, tree)) == []


RACE = """
mkdir -p tree
while :; do
  echo x > b; mv b tree/file; ln -s @folder@/secret c; mv c tree/file
  ln -sfn @folder@ tree/d; rm tree/d; mkdir tree/d; echo x > tree/d/secret; rm -r tree/d
done # @mark@
"""


async def lost_race(world: World) -> bool:
    """Return whether a link came to lead out of the sandbox while files were fetched."""
    session = await world.mine.session()
    racing = asyncio.create_task(session.run(world.text(RACE), time_s=3.0))
    lost = False
    while not racing.done() and not lost:
        for path in ("tree", "tree/file", "tree/d/secret"):
            try:
                lost = lost or bool(_unfit(world, await world.mine.get([path], SMALL), SMALL))
            except (ValueError, OSError, tarfile.TarError):
                continue
        await asyncio.sleep(0.001)
    await racing
    await session.close()
    await once(world.mine, CLEAN)
    return lost


def test_a_race_is_lost_by_the_naive_sandbox(naive: World) -> None:
    assert naive.runner.run(lost_race(naive))


def test_a_race_is_not_lost(world: World) -> None:
    assert not world.runner.run(lost_race(world))


def test_files_that_differ_in_case_are_two(world: World) -> None:
    async def scenario() -> None:
        await world.mine.put(packed([*member("case/A", b"1"), *member("case/a", b"2")]))
        assert (await once(world.mine, "cat case/A case/a; rm -r case")).stdout == b"12"

    world.runner.run(scenario())


def test_a_fifo_of_the_task_holds_up_no_transfer(world: World) -> None:
    """The naive sandbox would open it and wait for a reader until the end of the test: there is no control."""

    async def scenario() -> None:
        await once(world.mine, "mkfifo pipe; mkdir -p folder; mkfifo folder/pipe")
        async with asyncio.timeout(patient(LATE_S)):
            await world.mine.put(packed([*member("pipe"), *member("folder/pipe")]))
        assert (await once(world.mine, "cat pipe folder/pipe; rm -r pipe folder")).stdout == EVIL * 2

    world.runner.run(scenario())
