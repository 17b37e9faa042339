"""Runs a task's own script in a sandbox, on the tree of the task, to see what it changes."""

from __future__ import annotations

import asyncio
import io
import shlex
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from services.curator.sources import Refused
from shared.environments.repository import runtime, trees
from shared.environments.repository.trees import File, Link, Tree
from shared.problems.importing import STORE
from shared.sandbox import open_sandboxes
from shared.sandbox.contract import WORKSPACE, Caps, Limits, Sandbox, Session

_FOLDER = ".etude-solution"
_TIME_S = 300.0
_CAPS = Caps(size=trees.MAX_BYTES, files=trees.MAX_FILES)
_SAID = 300  # characters of what a failing script printed


def ran(tree: Tree, files: Mapping[str, File], script: str) -> dict[str, File | Link]:
    """Return the tree after a script, which runs in its root. `files`: the script and what lies beside it. Raises Refused
    where it fails, SandboxUnavailable."""
    return asyncio.run(_ran(tree, files, script))


async def _ran(tree: Tree, files: Mapping[str, File], script: str) -> dict[str, File | Link]:
    whole = {**tree, **{f"{_FOLDER}/{path}": file for path, file in files.items()}}
    sandboxes = open_sandboxes("bubblewrap")
    with tempfile.TemporaryDirectory(prefix="etude-solution-") as name:
        trees.write(whole, Path(name) / "tree")
        base = runtime.base(STORE.parent / "environments", Path(name) / "tree", ".")
        try:
            sandbox = await sandboxes.open(base, Limits(memory_mb=2048, processes=128))
            session = await sandbox.session()
            done = await session.run(f"/bin/bash {WORKSPACE}/{_FOLDER}/{shlex.quote(script)}", time_s=_TIME_S)
            if done.exit_code != 0:
                said = (done.stdout + done.stderr).decode(errors="replace").strip()[-_SAID:]
                raise Refused(f"{script}: ended with {done.exit_code} in the sandbox, without the network: {said}")
            after = await _after(sandbox, session, whole)
        finally:
            await sandboxes.close()
    hidden = ("__pycache__", _FOLDER)
    return {path: entry for path, entry in after.items() if not any(name in path.split("/") for name in hidden)}


async def _after(sandbox: Sandbox, session: Session, before: Tree) -> dict[str, File | Link]:
    """Return the tree as it is now. Raises Refused, SandboxUnavailable."""
    try:
        changes = await sandbox.changes(_CAPS)
    except ValueError as error:
        raise Refused(f"its changes cannot be taken: {error}") from None
    links = [path for path, why in changes.refused.items() if why == "a link"]
    if odd := sorted(set(changes.refused) - set(links)):
        raise Refused(f"it leaves {odd[0]!r:.100}: {changes.refused[odd[0]]}; allowed: files and links")
    written: dict[str, File | Link] = {}
    with tarfile.open(fileobj=io.BytesIO(changes.written), mode="r:") as archive:
        for member in archive:
            if member.isreg() and (data := archive.extractfile(member)) is not None:
                written[member.name] = File(data.read(), bool(member.mode & 0o100))
    if links:
        script = "for at in " + shlex.join(links) + "; do readlink -n -- \"$at\"; printf '\\0'; done"
        said = (await session.run(script, time_s=_TIME_S, cwd=WORKSPACE)).stdout
        written |= {path: Link(target.decode()) for path, target in zip(links, said.split(b"\0"), strict=False)}
    folders = {"/".join(path.split("/")[:count]) for path in written for count in range(1, path.count("/") + 1)}
    gone = {*changes.deleted, *folders}
    return {**{path: entry for path, entry in before.items() if path not in gone}, **written}
