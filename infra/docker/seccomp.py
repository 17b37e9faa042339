"""Makes `seccomp-worker.json`: Docker's default profile, plus exactly what bubblewrap needs without a privilege.

    python3 infra/docker/seccomp.py DEFAULT.json      (moby's profiles/seccomp/default.json, Apache-2.0)

The profile is flat, for a process without capabilities on x86_64 and aarch64. Docker reads rules with conditions; the
kubelet and containerd read the same file as the OCI's plain format, which has none, and would take a rule that is meant
for one capability as meant for all.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PROFILE = Path(__file__).with_name("seccomp-worker.json")
COPY = (
    PROFILE.parents[2] / "shared/sandbox/containers/seccomp.json"
)  # installed with the package, for sandboxes in containers
ARCHES = ("amd64", "arm64")
# Namespaces of its own (clone with any flag), what is mounted in them, the new root, the name of the host in it. Without any
# one of them bubblewrap does not start (tests/integration/test_worker_profile.py).
# All of them act inside the new user namespace alone: outside of it the process has no capability, and the kernel refuses.
# `unshare` is for sandboxes of commands: their /dev has terminals, for which bubblewrap makes a second user namespace.
NAMESPACES = ("clone", "mount", "pivot_root", "sethostname", "umount2", "unshare")
# Calls that say which pages of a file the machine holds in memory, as in shared/sandbox/inside/confine.py: containers of one
# machine share them. ENOSYS, which the C library takes for a kernel without them: with EPERM it would not fall back.
PAGES = ("cachestat", "io_setup", "io_submit", "mincore", "preadv2", "pwritev2")
_ENOSYS = 38


def applies(rule: dict[str, Any]) -> bool:
    """Whether a rule of the default profile holds for a process without capabilities on one of our architectures."""
    includes, excludes = rule.get("includes") or {}, rule.get("excludes") or {}
    if includes.get("caps"):
        return False
    if includes.get("arches") and not set(ARCHES) & set(includes["arches"]):
        return False
    return not (excludes.get("arches") and set(ARCHES) <= set(excludes["arches"]))


def flat(default: dict[str, Any]) -> dict[str, Any]:
    rules = []
    for rule in default["syscalls"]:
        names = [
            name for name in rule["names"] if name not in (*NAMESPACES, *PAGES)
        ]  # `clone` without namespaces is part of ours
        if names and applies(rule):
            kept = {key: rule[key] for key in ("action", "args", "errnoRet") if rule.get(key) is not None}
            rules.append({"names": names, **kept})
    rules.append(
        {"comment": "namespaces for bubblewrap", "names": list(NAMESPACES), "action": "SCMP_ACT_ALLOW"},
        {
            "comment": "what memory holds is nobody's business",
            "names": list(PAGES),
            "action": "SCMP_ACT_ERRNO",
            "errnoRet": _ENOSYS,
        },
    )
    return {
        "defaultAction": default["defaultAction"],
        "defaultErrnoRet": default["defaultErrnoRet"],
        # No 32-bit sub-architectures: their numbers are a second door to every call, and nothing here uses them.
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"],
        "syscalls": rules,
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    text = json.dumps(flat(json.loads(Path(sys.argv[1]).read_text())), indent=1) + "\n"
    for place in (PROFILE, COPY):
        place.write_text(text)
