"""The system call filter, interpreted: what it lets pass and what not, on each architecture."""

from __future__ import annotations

import struct

import pytest

from shared.sandbox.inside.confine import _AUDIT_ARCH, _CALLS, _SHARED_CALLS, COMMANDS_FAMILIES, filter_program

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
MACHINES = sorted(_CALLS)


def interpret(program: bytes, nr: int, arch: int, flags: int = 0, second: int = 0) -> int:
    """Classic BPF over struct seccomp_data {int nr; u32 arch; u64 ip; u64 args[6]}; `flags`, `second`: its arguments."""
    data = struct.pack("<IIQ6Q", nr, arch, 0, flags, second, 0, 0, 0, 0)
    at = accumulator = 0
    while True:
        code, yes, no, operand = struct.unpack_from("HBBI", program, 8 * at)
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif code == 0x06:
            return operand
        else:
            taken = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: bool(accumulator & operand)}[
                code
            ]
            at += yes if taken else no


@pytest.mark.parametrize("machine", MACHINES)
def test_every_listed_call_is_refused_and_every_other_passes(machine: str) -> None:
    program, arch = filter_program(machine), _AUDIT_ARCH[machine]
    calls = {**_CALLS[machine], **_SHARED_CALLS}
    clone, clone3, _ = calls.pop("clone"), calls.pop("clone3"), calls.pop("fcntl")
    for number in range(600):
        expected = EPERM if number in calls.values() else ENOSYS if number == clone3 else ALLOW
        assert interpret(program, number, arch) == expected, number
    assert interpret(program, clone, arch, flags=0x11) == ALLOW


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
    for program in (filter_program(machine), filter_program(machine, families=COMMANDS_FAMILIES, shared_objects=True)):
        for command in range(2048):
            expected = EPERM if command == 1024 else ALLOW  # F_SETLEASE
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
def test_other_tables_of_system_calls_are_closed(machine: str) -> None:
    program, arch = filter_program(machine), _AUDIT_ARCH[machine]
    assert interpret(program, 1, 0x40000003) == KILL  # i386
    if machine == "x86_64":
        assert interpret(program, 0x40000000 + 39, arch) == EPERM  # x32
