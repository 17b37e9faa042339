"""A sandbox's group in cgroup v2, over a tree of plain files and, where the kernel lets us, over a real one."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.sandbox import cgroups
from shared.sandbox.cgroups import Group, Place
from shared.sandbox.inside import tree
from tests.patience import until

MOUNT = "30 1 0:28 / {0} rw - cgroup2 cgroup2 rw\n"
KERNELS = {  # what the kernel puts into a new group
    "cgroup.procs": "",
    "memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n",
    "memory.stat": "anon 0\nfile 0\npgmajfault 0\n",
    "memory.max": "max\n",
    "memory.swap.max": "max\n",
    "pids.max": "max\n",
    "pids.events": "max 0\n",
}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """This process's group, which may be divided."""
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("memory pids\n")
    return tmp_path


@pytest.fixture
def group(own: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    plain = Path.mkdir

    def mkdir(self: Path) -> None:
        plain(self)
        for name, text in KERNELS.items():
            (self / name).write_text(text)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    made = Group(Place(2, own, own), "1")
    monkeypatch.undo()
    yield made
    for folder in made.folders:
        for file in folder.iterdir():  # the kernel's go with their group
            file.unlink()
    made.remove()
    assert [path.name for path in own.iterdir() if path.is_dir()] == []


def test_limits_are_those_of_version_2_and_swap_is_none(group: Group) -> None:
    group.limit(512 << 20, 72)
    [folder] = group.folders
    said = {name: (folder / name).read_text().strip() for name in ("memory.max", "memory.swap.max", "pids.max")}
    assert said == {"memory.max": str(512 << 20), "memory.swap.max": "0", "pids.max": "72"}


def test_a_kernel_without_swap_limits_serves(group: Group) -> None:
    [folder] = group.folders
    (folder / "memory.swap.max").unlink()
    group.limit(512 << 20, 72)
    assert (folder / "pids.max").read_text() == "72"
    assert not (folder / "memory.swap.max").exists()


def test_events_are_counted(group: Group) -> None:
    [folder] = group.folders
    before = group.counts()
    assert (before.memory, before.forks, before.full) == (0, 0, 0)
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 1\noom_group_kill 0\n")
    (folder / "pids.events").write_text("max 3\n")
    after = group.counts()
    assert (after.memory, after.forks, after.full) == (1, 3, 2)  # killed for its own limit: the task's doing
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 2\noom_group_kill 0\n")
    host = group.counts()
    assert host.memory > after.memory  # a process died, and its own limit was not met: the host ran out
    assert host.full == after.full


def test_a_group_that_starves_loses_its_largest_process(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    [folder] = group.folders
    group.limit(100 << 20, 72)
    killed: list[tuple[list[int], int]] = []
    sizes = {7: 10, 8: 20_000}
    monkeypatch.setattr(tree, "look", lambda pid: tree.Process(1, 1, 1, sizes[pid], False))
    monkeypatch.setattr(tree, "send", lambda pids, number: killed.append((list(pids), number)))
    (folder / "cgroup.procs").write_text("7\n8\n")
    for second in range(0, 30):
        (folder / "memory.stat").write_text(f"anon {99 << 20}\nfile 4096\npgmajfault {second * 100_000}\n")
        group.relieve(float(second))
        if killed:
            break
    assert killed == [([8], signal.SIGKILL)]
    assert group.counts().memory == 1
    (folder / "cgroup.procs").write_text("")


def test_a_process_joins_by_an_open_file(group: Group) -> None:
    for fd in group.joins():
        os.write(fd, b"0")
        os.close(fd)
    assert (group.folders[0] / "cgroup.procs").read_text() == "0"
    (group.folders[0] / "cgroup.procs").write_text("")


@pytest.mark.parametrize(("offered", "place"), [("memory", "no pids"), ("pids", "nowhere"), ("memory pids", "both")])
def test_only_controllers_that_are_offered_are_used(own: Path, offered: str, place: str) -> None:
    (own / "cgroup.controllers").write_text(f"cpu {offered}\n")
    found = cgroups.find("0::/\n", MOUNT.format(own))
    wanted = {"both": Place(2, own, own), "no pids": Place(2, own, None), "nowhere": cgroups.NOWHERE}
    assert found == wanted[place]
    assert found.memory_by == ("watchdog" if place == "nowhere" else "cgroup v2")


def test_controllers_are_passed_on_to_children(own: Path) -> None:
    control = own / "cgroup.subtree_control"
    control.write_text("")
    assert cgroups.find("0::/\n", MOUNT.format(own)).version == 2
    assert control.read_text() in ("+memory", "+pids")  # a plain file keeps the last; the kernel adds them up


def test_a_group_that_the_kernel_does_not_let_us_divide_is_no_place(own: Path) -> None:
    (own / "cgroup.subtree_control").unlink()
    (own / "cgroup.subtree_control").mkdir()  # refuses to be read and written, as a group with processes does (EBUSY)
    assert cgroups.find("0::/\n", MOUNT.format(own)) == cgroups.NOWHERE


def _real() -> tuple[Path, bool]:
    """Return this process's own v2 group, and whether its children have the controllers of memory and processes."""
    for folder, file in cgroups.clocks_here():
        if file == "cpu.stat":
            return folder, cgroups.here().version == 2
    pytest.skip("no cgroup v2 here that this process may divide")


def test_a_real_group_holds_its_processes_and_goes_with_them() -> None:
    """Kill, count and remove, by a kernel's own files. Limits only where the controllers are bound to v2."""
    folder, limits = _real()
    place = Place(2, folder if limits else None, folder if limits else None)
    name = f"test-{secrets.token_hex(6)}"
    group = folder / f"{cgroups.PREFIX}{name}"
    made = Group(place, name) if limits else None
    if made is None:
        group.mkdir()
    try:
        if made is not None:
            made.limit(64 << 20, 8)
            assert (group / "memory.max").read_text() == f"{64 << 20}\n"
        with open(group / "cgroup.procs", "w") as join:
            joined = subprocess.Popen(["sleep", "600"], preexec_fn=lambda: os.write(join.fileno(), b"0"))
        assert [int(word) for word in (group / "cgroup.procs").read_text().split()] == [joined.pid]
    finally:
        cgroups.end([group]) if made is None else made.remove()
    assert not group.exists()
    assert joined.wait() == -signal.SIGKILL
    until(lambda: tree.look(joined.pid) is None, "the process is gone")
