"""One attempt at a problem of several steps: what is submitted ends a step, and the next instruction is the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from shared.contracts.messages import StopReason
from shared.contracts.trajectory import Change, Submission
from shared.environments import Brief, Call, InfrastructureError, Message, Result, SandboxGone, Unrestorable, Workspace
from shared.environments.repository.files import FileError
from shared.environments.repository.submission import SubmissionError, apply_inside
from shared.environments.repository.workspace import RepositoryWorkspace
from shared.environments.steps.problem import StepsProblem, Then
from shared.sandbox import SandboxUnavailable
from shared.sandbox.contract import WORKSPACE

SYSTEM = (
    "You are a coding agent. The task in the repository {folder} has {count} steps. Solve the step with the tools, then call "
    "submit: you are told the next one."
)
SUBMIT = "Submit the work of this step. You are told the next step, or the task ends."
_SETUP_S = 600.0  # of one command
_SHOWN = 500  # characters of what a command said


class _Saved(msgspec.Struct, frozen=True):
    """`inner`: the state of the repository's workspace. `told`: the step of the brief that was told last."""

    inner: bytes
    done: list[dict[str, Change]]
    told: int


class StepsWorkspace(Workspace):
    """See shared.environments.Workspace. `done`: what each submitted step left, as changes of the problem's tree."""

    def __init__(self, inner: RepositoryWorkspace, problem: StepsProblem) -> None:
        self._inner, self._problem = inner, problem
        self.limits, self.notes = inner.limits, inner.notes
        self.done: list[dict[str, Change]] = []
        self._told = 0

    @property
    def decisions(self) -> Sequence[object]:  # type: ignore[override]
        return self._inner.decisions

    def brief(self, *, continues: bool = False) -> Brief:
        self._told = len(self.done)
        return self._brief_of(self._told)

    def _brief_of(self, step: int) -> Brief:
        return told(self._problem, self._inner.brief(), step)

    async def call(self, calls: Sequence[Call]) -> list[Result]:
        results = await self._inner.call(calls)
        return [await self._or_next(result) for result in results]

    async def final(self, text: str) -> Result | None:
        return await self._next() if self._steps_left else None

    async def submission(self) -> Submission:
        work = await self._inner.submission()
        return Submission(changes=work.changes, steps=[*self.done, work.changes])

    async def save(self) -> bytes | None:
        inner = await self._inner.save()
        return None if inner is None else msgspec.msgpack.encode(_Saved(inner, self.done, self._told))

    async def restore(self, saved: bytes) -> Brief:
        try:
            found = msgspec.msgpack.decode(saved, type=_Saved)
        except msgspec.MsgspecError as error:
            raise Unrestorable(f"the steps so far: {error}") from None
        await self._inner.restore(found.inner)
        self.done, self._told = found.done, found.told
        return self._brief_of(self._told)

    async def close(self) -> None:
        await self._inner.close()

    @property
    def _steps_left(self) -> int:
        return len(self._problem.then) - len(self.done)

    async def _or_next(self, result: Result) -> Result:
        """Return the result; of a call that submits a step but the last, the next step instead."""
        if result.ends is not StopReason.submitted or not self._steps_left:
            return result
        next_step = await self._next()
        return replace(result, ok=next_step.ok, text=next_step.text, ends=None)

    async def _next(self) -> Result:
        """Keep the work of the step, begin the next one, and return its instruction."""
        changes = await self._inner.changes()
        if isinstance(changes, str):  # mostly of a message without a call: the tool asks before
            self._inner.go_on()
            return Result(ok=False, text=f"cannot submit: {changes}")
        self.done.append(changes)
        step = self._problem.then[len(self.done) - 1]
        trouble = await self._begun(step)
        self._inner.go_on()
        return Result(text="\n\n".join(filter(None, (headed(self._problem, len(self.done)), trouble))))

    async def _begun(self, step: Then) -> str:
        """Put the step's files into the tree and run its commands. Return which command failed; empty: none did. The work of the
        steps before may be why, so that it is no failure of the machine."""
        try:
            await apply_inside(step.files, self._inner.box.files, WORKSPACE)
        except (SubmissionError, FileError) as error:
            return f"The files of this step could not be put into the tree: {error}"
        try:
            for command in step.setup:
                session = await self._inner.sandbox.session()
                try:
                    done = await session.run(command, time_s=_SETUP_S, cwd=self._problem.folder)
                finally:
                    await session.close()
                if done.exit_code != 0:
                    said = (done.stdout + done.stderr).decode(errors="replace").strip()[-_SHOWN:]
                    return f"The set-up of this step failed: {command!r:.200}: {said}"
        except SandboxUnavailable as error:
            raise SandboxGone(str(error)) from None
        except OSError as error:
            raise InfrastructureError(f"{type(error).__name__}: {error}") from None
        return ""


def headed(problem: StepsProblem, step: int) -> str:
    """Return the instruction of a step (0 is the first) under its number."""
    prompt = problem.prompt if step == 0 else problem.then[step - 1].prompt
    return f"Step {step + 1} of {1 + len(problem.then)}:\n\n{prompt}"


def told(problem: StepsProblem, plain: Brief, step: int) -> Brief:
    """Return the task as it stands in a step: all instructions so far. `plain`: the brief of kind `repository`."""
    system = SYSTEM.format(folder=problem.folder, count=1 + len(problem.then))
    before = [f"{headed(problem, earlier)}\n\n(This step is submitted.)" for earlier in range(step)]
    user = "\n\n".join([*before, headed(problem, step)])
    tools = tuple(replace(tool, description=SUBMIT) if tool.effect == "ends" else tool for tool in plain.tools)
    return Brief((Message("system", system), Message("user", user)), tools)
