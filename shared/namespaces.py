"""Why bubblewrap cannot make a sandbox here, from its own words and what the kernel's settings say.

Standard library only, and nothing newer than Python 3.9: set-up asks on whatever Python is there.
"""

from __future__ import annotations

from pathlib import Path

MASKED = (
    "part of /proc is masked, so no sandbox can have its own: a container needs security_opt systempaths=unconfined (docker), "
    "or procMount: Unmasked with hostUsers: false (Kubernetes)"
)
FULL = "no space is left on the disk: free some, or name a folder on another disk (TMPDIR; of services: ETUDE_STATE)"
FOREIGN = "the base holds programs of another machine type: make it on this one, or name its own"
_NONE_LEFT = (
    "the limit on user namespaces is met: sysctl user.max_user_namespaces=10000, on the host and in its containers"
)
_FULL_WORDS = ("No space left on device", "Disk quota exceeded")
_NAMESPACE_WORDS = (
    "namespace",
    "uid map",
    "setting up",
    "RTM_NEWADDR",
    "clone",
    "unshare",
    "pivot_root",
    "Can't mount",
)


def hint(said: str, proc: Path = Path("/proc")) -> str:
    """Return what is missing and how to get it; empty: nobody knows. `said`: what bubblewrap or the loop wrote."""
    if "Exec format error" in said:
        return FOREIGN
    if "mount proc" in said or "mount /proc" in said:
        return MASKED
    if not any(word in said for word in _NAMESPACE_WORDS):
        return FULL if any(word in said for word in _FULL_WORDS) else ""
    found = [_NONE_LEFT if "_namespaces exceeded" in said else "", *(_setting(proc, *one) for one in _SETTINGS)]
    if _held_by_seccomp(proc):
        found.append(
            "a seccomp profile holds this process: use infra/docker/seccomp-worker.json, and apparmor=unconfined "
            "where the host has AppArmor"
        )
    return "; ".join(one for one in found if one)


_SETTINGS = (
    ("sys/user/max_user_namespaces", "0", "user namespaces are switched off: sysctl user.max_user_namespaces=10000"),
    (
        "sys/kernel/unprivileged_userns_clone",
        "0",
        "user namespaces are root's alone: sysctl kernel.unprivileged_userns_clone=1",
    ),
    (
        "sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "AppArmor restricts user namespaces: sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)


def _setting(proc: Path, name: str, bad: str, way_out: str) -> str:
    return way_out if _read(proc / name) == bad else ""


def _held_by_seccomp(proc: Path) -> bool:
    status = _read(proc / "self/status") or ""
    return any(line.split() == ["Seccomp:", "2"] for line in status.splitlines())


def _read(path: Path) -> str | None:
    """Return a file's text without its end of line; None: it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
