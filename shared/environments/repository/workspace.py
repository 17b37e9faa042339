"""One attempt at a repository: its sandbox, its tools, and its work as a submission."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

import msgspec

from shared.contracts.trajectory import Change, Submission
from shared.environments import Brief, Call, InfrastructureError, Limits, Result, SandboxGone, Unrestorable
from shared.environments.repository import cutting
from shared.environments.repository.files import FileError, Files
from shared.environments.repository.shell import Shell
from shared.environments.repository.submission import (
    MAX_BYTES,
    MAX_CHANGES,
    Difference,
    SubmissionError,
    apply_inside,
    change_of,
    difference,
)
from shared.environments.repository.unpacked import Entries
from shared.environments.tools import Toolbox, ToolError, load
from shared.sandbox import SandboxUnavailable
from shared.sandbox.contract import WORKSPACE, Decision, Sandbox
from shared.together import together

_RELIEVE_S = 10.0
_NOT_RUN = "not run: the work was submitted before it"


class _Saved(msgspec.Struct, frozen=True):
    """`changes`: of the work directory. `folder`: that of the shell. `spilled`: how many outputs were kept in files."""

    changes: dict[str, Change]
    folder: str
    spilled: int


class RepositoryWorkspace:
    """See shared.environments.Workspace. `base`: the tree as the agent found it. What `save` keeps are the files of the work
    directory; the shell says what else is gone after `restore`."""

    def __init__(self, sandbox: Sandbox, box: Toolbox, brief: Brief, limits: Limits, base: Entries) -> None:
        self.limits, self.notes = limits, box.notes
        self.sandbox, self.box, self._brief, self._base = sandbox, box, brief, base
        self._spilled = 0
        self._ended = False
        box.unsubmittable = self._unsubmittable

    @property
    def decisions(self) -> Sequence[Decision]:
        return self.sandbox.decisions

    def brief(self, *, continues: bool = False) -> Brief:
        return self._brief

    async def call(self, calls: Sequence[Call]) -> list[Result]:
        """Execute the calls of one turn, in order. Adjacent calls that only read run at the same time; any other runs alone."""
        results: list[Result] = []
        for reads, group in itertools.groupby(calls, key=self._reads):
            batch = list(group)
            if reads:
                results += await together(map(self._one, batch))
            else:
                results += [await self._one(call) for call in batch]
        return results

    async def final(self, text: str) -> Result | None:
        return None

    async def submission(self) -> Submission:
        with suppress(SandboxUnavailable):
            await self.box.shell.close()  # nothing changes a file while it is read
        found = await self.changes()
        if isinstance(found, str):
            self.notes["submission"] = f"nothing was submitted: {found}"
            return Submission()
        return Submission(changes=found)

    async def save(self) -> bytes | None:
        """See shared.environments.Workspace. None also where the work directory holds new links or devices, or more than can be
        submitted."""
        scanned = await self._scanned()
        if isinstance(scanned, str) or scanned[1].refused:
            return None
        changes = await self._read(*scanned)
        if isinstance(changes, str):
            return None
        return msgspec.msgpack.encode(_Saved(changes, self.box.shell.folder, self._spilled))

    async def restore(self, saved: bytes) -> Brief:
        try:
            found = msgspec.msgpack.decode(saved, type=_Saved)
            await apply_inside(found.changes, self.box.files, WORKSPACE)
        except (msgspec.MsgspecError, SubmissionError, FileError) as error:
            raise Unrestorable(f"the work directory: {type(error).__name__}: {error}") from None
        self._spilled = found.spilled
        self.box.shell.renew(found.folder)
        return self._brief

    def go_on(self) -> None:
        """Take calls again after one that submitted."""
        self._ended = False

    async def close(self) -> None:
        async with AsyncExitStack() as last:  # whatever one of them raises, the sandbox is closed
            last.push_async_callback(self.sandbox.close)
            last.push_async_callback(self.box.shell.close)
            await self.box.files.close()

    def _reads(self, call: Call) -> bool:
        spec = self._brief.tool(call.name)
        return spec is not None and spec.effect == "reads"

    async def _one(self, call: Call) -> Result:
        if self._ended:
            return Result(call.id, call.name, _NOT_RUN, ran=False)
        if call.error or self._brief.tool(call.name) is None:
            return Result(call.id, call.name, call.error or f"tool {call.name!r:.60}: not offered", ok=False)
        try:
            answer = await load(call.name).run(self.box, call.arguments)
        except ToolError as error:
            answer = Result(text=str(error), ok=False)
        except SandboxUnavailable as error:
            raise SandboxGone(str(error)) from None
        result = Result(text=answer) if isinstance(answer, str) else answer
        if not isinstance(result, Result):
            raise InfrastructureError(
                f"tool {call.name!r:.60}: its `run` returned {type(answer).__name__}; allowed: a text or a Result"
            )
        self._ended = self._ended or result.ends is not None
        text = (
            (await self._short(result.text)).encode("utf-8", "replace").decode()
        )  # tokenizers take no lone surrogates
        return replace(result, call=call.id, tool=call.name, text=text)

    async def _short(self, text: str) -> str:
        """Cut a long text in the middle, and keep it whole in a file of the sandbox."""
        parts = cutting.cut(text)
        if parts is None:
            return text
        self._spilled += 1
        path = f"/tmp/output-{self._spilled}.txt"
        try:
            await self.box.files.write(path, text.encode("utf-8", "surrogateescape"))
        except FileError as error:
            path = f"not kept ({error})"
        return cutting.joined(text, parts, path)

    async def _unsubmittable(self) -> str | None:
        found = await self.changes()
        return f"cannot submit: {found}" if isinstance(found, str) else None

    async def changes(self) -> dict[str, Change] | str:
        """Return what differs from the base, or why that is too much. Links and devices are left out, and noted."""
        scanned = await self._scanned()
        if isinstance(scanned, str):
            return scanned
        found = scanned[1]
        if found.refused:
            shown = "\n".join(f"{path}: {why}" for path, why in sorted(found.refused.items())[:20])
            self.notes["left_out"] = f"{len(found.refused)} paths are no regular files:\n{shown}"
        return await self._read(*scanned)

    async def _scanned(self) -> tuple[Entries, Difference] | str:
        """Return the files as they are, with what differs from the base; or why they cannot be read."""
        try:
            now: Entries = (await self.box.files.ask("scan", path=WORKSPACE))["entries"]
        except FileError as error:
            return f"the files cannot be read: {error}"
        return now, difference(self._base, now)

    async def _read(self, now: Entries, found: Difference) -> dict[str, Change] | str:
        """Return the changes with their content, or why that is too much."""
        if len(found.changed) + len(found.deleted) > MAX_CHANGES:
            return f"found {len(found.changed) + len(found.deleted)} changed files; allowed: at most {MAX_CHANGES}"
        if (size := sum(now[path][3] for path in found.changed)) > MAX_BYTES:
            largest = max(found.changed, key=lambda path: now[path][3])
            return f"found {size} bytes in changed files, {largest} the largest; allowed: at most {MAX_BYTES}"
        changes = {path: Change() for path in found.deleted}
        for path in found.changed:
            try:
                data, whole = await self.box.files.read(f"{WORKSPACE}/{path}", now[path][3])
            except FileError as error:
                return str(error)
            if not whole:
                return f"{path} was written while it was read"
            changes[path] = change_of(data, now[path][2])
        return changes


async def opened(
    sandbox: Sandbox, brief: Brief, limits: Limits, base: Entries | None, folder: str, python: str = ""
) -> RepositoryWorkspace:
    """Return a workspace in a sandbox that holds the tree. `base`: the tree's entries; None: they are read from the sandbox
    as it is. `python`: see `Files`. Raises InfrastructureError."""
    shell = Shell(sandbox, folder)

    async def relieve() -> None:
        await shell.close()
        session = await sandbox.session()
        try:  # the agent owns the folder, and may have closed it to itself
            await session.run(f"chmod u+rwx {WORKSPACE}", time_s=_RELIEVE_S)
        finally:
            await session.close()

    files = Files(sandbox, relieve, python)
    if base is None:
        try:
            base = (await files.ask("scan", path=WORKSPACE))["entries"]
        except FileError as error:
            raise InfrastructureError(f"the tree cannot be read: {error}") from None
    box = Toolbox(files, shell, folder, command_s=60.0)
    return RepositoryWorkspace(sandbox, box, brief, limits, base)
