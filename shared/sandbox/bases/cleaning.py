"""Says which files of a machine are no part of a base, and adds what each base has.

Out go what belongs to one machine, what lies in memory on a running one, what apt and dpkg can make again, and secrets.
"""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

from shared.sandbox.bases.rootfs import TIME, File, Folder, put, walk

_EMPTIED = ("dev", "proc", "run", "sys", "tmp", "var/tmp")
_WITHOUT_FILES = ("var/cache/apt/", "var/lib/apt/lists/", "var/log/")  # programs expect the folders in them
_DROPPED = (
    ".dockerenv",
    "lost+found",
    "etc/machine-id",
    "etc/hostname",
    "etc/hosts",
    "etc/resolv.conf",
    "etc/shadow*",
    "etc/gshadow*",
    "etc/passwd-",
    "etc/group-",
    "etc/subuid*",
    "etc/subgid*",
    "etc/ssh/ssh_host_*",
    "root/.ssh",
    "root/.bash_history",
    "home/*/.ssh",
    "home/*/.bash_history",
    "var/cache/debconf/*-old",
    "var/cache/ldconfig/aux-cache",
    "var/lib/dbus/machine-id",
    "var/lib/dpkg/*-old",
    "var/lib/systemd/random-seed",
)
_DROPS = re.compile("|".join(fnmatch.translate(pattern).replace(".*", "[^/]*") for pattern in _DROPPED))
# Places where a sandbox mounts something, or where programs expect to write. `workspace` is the work directory.
_FOLDERS = ("dev", "etc", "home", "proc", "root", "run", "sys", "tmp", "var/tmp", "workspace")
_HOSTS = b"127.0.0.1 localhost\n::1 localhost\n"


def is_left_out(path: str) -> bool:
    """Return whether a path, and what is below it, is no part of a base. It may stand in the root's own folders alone."""
    return bool(_DROPS.match(path)) or path.rpartition("/")[0] in _EMPTIED


def clean(root: Folder) -> None:
    """Take out what is no part of a base, and add what each one has."""
    for path, node in [("", root), *walk(root)]:
        if isinstance(node, Folder):
            before = f"{path}/" if path else ""
            bare = before.startswith(_WITHOUT_FILES)
            node.children = {
                name: child
                for name, child in node.children.items()
                if not is_left_out(before + name) and not (bare and not isinstance(child, Folder))
            }
    for path in _FOLDERS:
        put(root, path, Folder())
    put(root, "etc/hosts", File(Path("hosts"), 0, len(_HOSTS), False, TIME, _HOSTS))
