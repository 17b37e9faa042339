"""The system call filter, interpreted: what it lets pass and what not, on each architecture."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from infra.docker import seccomp
from shared.sandbox.inside.confine import (
    _AUDIT_ARCH,
    _CALLS,
    _OBJECT_CALLS,
    _PAGE_CALLS,
    _SHARED_CALLS,
    _SIGNAL_CALLS,
    COMMANDS_FAMILIES,
    filter_program,
)
from shared.sandbox.inside.needed_calls import NEEDED

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
MACHINES = sorted(_CALLS)


def interpret(program: bytes, nr: int, arch: int, flags: int = 0, second: int = 0) -> int:
    """Classic BPF over struct seccomp_data {int nr; u32 arch; u64 ip; u64 args[6]}; `flags`, `second`: its arguments."""
    return trace(program, nr, arch, flags, second)[0]


def steps(program: bytes, nr: int, arch: int) -> int:
    return trace(program, nr, arch)[1]


def trace(program: bytes, nr: int, arch: int, flags: int = 0, second: int = 0) -> tuple[int, int]:
    """Return the answer, and after how many instructions."""
    data = struct.pack("<IIQ6Q", nr, arch, 0, flags, second, 0, 0, 0, 0)
    at = accumulator = done = 0
    while True:
        done += 1
        code, yes, no, operand = struct.unpack_from("HBBI", program, 8 * at)
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif code == 0x06:
            return operand, done
        else:
            taken = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: bool(accumulator & operand)}[
                code
            ]
            at += yes if taken else no


@pytest.mark.parametrize("machine", MACHINES)
def test_a_function_run_has_the_calls_that_it_needs_and_no_other(machine: str) -> None:
    program, arch = filter_program(machine), _AUDIT_ARCH[machine]
    calls, needed = {**_CALLS[machine], **_SHARED_CALLS}, NEEDED[machine]
    assert not {"socket", "clone", "fcntl", "socketpair"} & needed.keys()
    looked_at = {calls.pop(name) for name in ("clone", "clone3", "fcntl", "socketpair")}
    assert not looked_at & set(needed.values())
    assert not set(calls.values()) & set(needed.values())
    for number in range(1024):
        if number not in looked_at:
            expected = ALLOW if number in needed.values() else EPERM if number in calls.values() else ENOSYS
            assert interpret(program, number, arch) == expected, number
    assert interpret(program, _SHARED_CALLS["clone3"], arch) == ENOSYS
    assert interpret(program, calls["socket"], arch, flags=1) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_commands_have_every_call_but_those_of_the_list(machine: str) -> None:
    program, arch = filter_program(machine, families=COMMANDS_FAMILIES, shared_objects=True), _AUDIT_ARCH[machine]
    calls = {**_CALLS[machine], **_SHARED_CALLS}
    calls = {name: number for name, number in calls.items() if name not in ("clone", "clone3", "fcntl", "socketpair")}
    calls = {name: number for name, number in calls.items() if name not in (*_OBJECT_CALLS, *_SIGNAL_CALLS)}
    for number in set(range(1024)) - {_CALLS[machine][name] for name in ("clone", "fcntl", "socketpair")}:
        absent = (_SHARED_CALLS["clone3"], *_PAGE_CALLS[machine])
        expected = EPERM if number in calls.values() else ENOSYS if number in absent else ALLOW
        assert interpret(program, number, arch) == expected, number


@pytest.mark.parametrize("machine", MACHINES)
def test_a_filter_is_short_enough_and_decides_fast(machine: str) -> None:
    """The kernel takes 4,096 instructions, and runs them for each system call that depends on arguments."""
    program, arch = filter_program(machine), _AUDIT_ARCH[machine]
    assert len(program) // 8 < 512
    assert max(steps(program, number, arch) for number in range(600)) < 40


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    "flag", [0x80, 0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000]
)
def test_clone_makes_processes_and_threads_but_no_namespace(machine: str, flag: int) -> None:
    program, arch, clone = filter_program(machine), _AUDIT_ARCH[machine], _CALLS[machine]["clone"]
    assert interpret(program, clone, arch, flags=0x003D0F00) == ALLOW  # pthread_create
    assert interpret(program, clone, arch, flags=flag | 0x11) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_open_files_may_be_asked_and_changed_but_not_leased(machine: str) -> None:
    commands = filter_program(machine, families=COMMANDS_FAMILIES, shared_objects=True)
    for program, locks in ((filter_program(machine), (5, 6, 7, 36, 37, 38)), (commands, ())):
        for command in range(2048):
            expected = EPERM if command == 1024 or command in locks else ALLOW  # F_SETLEASE, F_SETLK and the like
            assert interpret(program, _CALLS[machine]["fcntl"], _AUDIT_ARCH[machine], 3, command) == expected, command
        unseen = 1024 | 1 << 32  # the kernel looks at 32 bits
        assert interpret(program, _CALLS[machine]["fcntl"], _AUDIT_ARCH[machine], 3, unseen) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_commands_may_use_sockets_that_their_namespaces_hold_and_no_other(machine: str) -> None:
    program = filter_program(machine, families=COMMANDS_FAMILIES, shared_objects=True)
    arch, calls = _AUDIT_ARCH[machine], _CALLS[machine]
    for family in range(64):
        expected = ALLOW if family in (1, 2, 10, 16) else EPERM  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
        assert interpret(program, calls["socket"], arch, flags=family) == expected, family
    assert interpret(program, calls["shmget"], arch) == ALLOW
    for name in ("mount", "unshare", "ptrace", "bpf", "keyctl", "open_by_handle_at"):
        assert interpret(program, calls[name], arch) == EPERM, name
    assert interpret(program, calls["clone"], arch, flags=0x11) == ALLOW
    assert interpret(program, calls["clone"], arch, flags=0x10000011) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("flags", [0, 0o4000, 0o2000000])  # SOCK_NONBLOCK, SOCK_CLOEXEC
def test_a_pair_of_sockets_is_of_af_unix_and_in_a_function_run_a_stream(machine: str, flags: int) -> None:
    function = filter_program(machine)
    commands = filter_program(machine, families=COMMANDS_FAMILIES, shared_objects=True)
    arch, pair = _AUDIT_ARCH[machine], _CALLS[machine]["socketpair"]
    for family in range(64):
        for kind in (1, 2, 3, 5):
            unix = family == 1
            assert interpret(function, pair, arch, family, kind | flags) == (ALLOW if unix and kind == 1 else EPERM)
            assert interpret(commands, pair, arch, family, kind | flags) == (ALLOW if unix else EPERM)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_kernels_log_is_closed_and_files_signal_nothing_between_function_runs(machine: str) -> None:
    arch, calls = _AUDIT_ARCH[machine], _CALLS[machine]
    commands = filter_program(machine, families=COMMANDS_FAMILIES, shared_objects=True)
    for name in ("syslog", "flock", "inotify_init1"):
        assert interpret(filter_program(machine), calls[name], arch) == EPERM, name
        assert interpret(commands, calls[name], arch) == (EPERM if name == "syslog" else ALLOW), name


@pytest.mark.parametrize("machine", MACHINES)
def test_no_call_says_which_pages_of_a_file_are_in_memory(machine: str) -> None:
    commands = filter_program(machine, families=COMMANDS_FAMILIES, shared_objects=True)
    for number in _PAGE_CALLS[machine]:
        assert number not in NEEDED[machine].values()
        for program in (filter_program(machine), commands):
            assert interpret(program, number, _AUDIT_ARCH[machine]) == ENOSYS, number


@pytest.mark.parametrize("machine", MACHINES)
def test_other_tables_of_system_calls_are_closed(machine: str) -> None:
    program, arch = filter_program(machine), _AUDIT_ARCH[machine]
    assert interpret(program, 1, 0x40000003) == KILL  # i386
    if machine == "x86_64":
        assert interpret(program, 0x40000000 + 39, arch) == EPERM  # x32


@pytest.mark.parametrize("machine", MACHINES)
def test_no_command_learns_by_asynchronous_reads_what_memory_holds(machine: str) -> None:
    program = filter_program(machine, families=COMMANDS_FAMILIES, shared_objects=True)
    setup, submit = {"x86_64": (206, 209), "aarch64": (0, 2)}[machine]
    assert interpret(program, setup, _AUDIT_ARCH[machine]) == ENOSYS
    assert interpret(program, submit, _AUDIT_ARCH[machine]) == ENOSYS


@pytest.mark.parametrize("profile", [seccomp.PROFILE, seccomp.COPY], ids=["workers", "containers"])
def test_the_profile_of_containers_lets_nothing_say_what_memory_holds(profile: Path) -> None:
    answers: dict[str, set[tuple[str, int]]] = {}
    for rule in json.loads(profile.read_text())["syscalls"]:
        for name in rule["names"]:
            answers.setdefault(name, set()).add((rule["action"], rule.get("errnoRet", 1)))
    for name in ("cachestat", "io_setup", "io_submit", "mincore", "preadv2", "pwritev2"):
        assert answers[name] == {("SCMP_ACT_ERRNO", 38)}  # as the filter of cells answers
    assert answers["preadv"] == {("SCMP_ACT_ALLOW", 1)}
