"""`python -m tests.integration.under_profile PROFILE [CALL …]`: one function run in a sandbox, by a process that the kernel holds
to a container's seccomp profile, the named calls taken out of it. Prints what came back, or why no sandbox started.

libseccomp is what container engines use themselves.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import sys
from pathlib import Path
from typing import Any

from shared import sandbox
from shared.sandbox import FunctionRun, SandboxUnavailable

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_COMPARE = {"SCMP_CMP_LT": 2, "SCMP_CMP_EQ": 4, "SCMP_CMP_GT": 6, "SCMP_CMP_MASKED_EQ": 7}
_EXISTS = -17
_NEW_NAMESPACES = 0x7E020000  # the flags that Docker's own profile refuses


class _Argument(ctypes.Structure):
    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def library() -> ctypes.CDLL:
    """Raises OSError where there is no libseccomp."""
    found = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    found.seccomp_init.restype = ctypes.c_void_p
    found.seccomp_rule_add_array.argtypes = [
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.c_void_p,
    ]
    found.seccomp_load.argtypes = [ctypes.c_void_p]
    return found


def hold(profile: dict[str, Any], without: set[str]) -> None:
    """From here on, for this process and all that it starts. Sets no_new_privs."""
    seccomp = library()
    context = seccomp.seccomp_init(_ERRNO | profile["defaultErrnoRet"])
    for rule in profile["syscalls"]:
        action = _ALLOW if rule["action"] == "SCMP_ACT_ALLOW" else _ERRNO | rule.get("errnoRet", 1)
        arguments = [_Argument(a["index"], _COMPARE[a["op"]], a["value"], 0) for a in rule.get("args", [])]
        array = (_Argument * max(1, len(arguments)))(*arguments)
        for name in set(rule["names"]) - without:
            number = seccomp.seccomp_syscall_resolve_name(name.encode())
            if number == -1:  # not of this architecture
                continue
            result = seccomp.seccomp_rule_add_array(context, action, number, len(arguments), array)
            if result not in (0, _EXISTS):
                raise RuntimeError(f"{name}: libseccomp says {result}")
    if "clone" in without:  # threads and processes stay, as under Docker's own profile; namespaces go
        plain = (_Argument * 1)(_Argument(0, _COMPARE["SCMP_CMP_MASKED_EQ"], _NEW_NAMESPACES, 0))
        number = seccomp.seccomp_syscall_resolve_name(b"clone")
        if seccomp.seccomp_rule_add_array(context, _ALLOW, number, 1, plain):
            raise RuntimeError("clone: libseccomp did not take the rule")
    if seccomp.seccomp_load(context):
        raise RuntimeError("the kernel did not take the profile")


async def answer() -> str:
    functions = sandbox.connect("bubblewrap", 1)
    try:
        [[result]] = await functions.run([FunctionRun(source="def f(x): return x + 1", entry="f", args=("[41]",))])
        return f"returned {result.value}"
    except SandboxUnavailable as error:
        return f"refused: {error}"
    finally:
        await functions.close()


if __name__ == "__main__":
    hold(json.loads(Path(sys.argv[1]).read_text()), set(sys.argv[2:]))
    print(asyncio.run(answer()))
