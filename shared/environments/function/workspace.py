"""One attempt at a function: its files in memory, edits within a line, visible tests in a sandbox.

Invariants:
- Calls of one turn run in order, up to the first that fails. The model wrote the later ones believing that it worked, so
  they are passed over.
- With retry=fresh, a failure restarts the attempt: the agent forgets what was said. The files are reset only when the next
  segment opens. If the attempt ends before that, the current files are submitted. After a test that passed, or in a segment
  that begins with a self-summary, a failure restarts nothing.
- A test of files that have failed before uses up no turn and no edit, `max_repeats` times at most: the limits are on what
  is tried. Its tokens count. It is answered from memory, but for the given files' first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import msgspec
import xxhash

from shared.contracts.messages import StopReason
from shared.contracts.run import Sampling
from shared.contracts.trajectory import Submission
from shared.environments import Brief, Call, Limits, Result, Unrestorable
from shared.environments.function.actions import Action, Observation, Tool
from shared.environments.function.brief import brief_of, told
from shared.environments.function.edits import EditError, Files
from shared.environments.function.visible_tests import LOAD_ERRORS
from shared.problems import FunctionProblem

MAX_BROKEN = 3  # calls that cannot be read or executed; a policy that breaks more is not going to recover


class Tests(Protocol):
    async def run(self, problem: FunctionProblem, files: dict[str, str]) -> Observation:
        """Run the visible tests on `files`. Raises InfrastructureError."""


class _Saved(msgspec.Struct, frozen=True):
    """The state of a workspace between two turns."""

    files: dict[str, str]
    past: tuple[dict[str, str], ...]
    told: dict[str, str]  # the files as the last brief showed them
    failed: dict[int, Observation | None]
    first_edit: dict[str, str] | None
    edits: int
    repeats: int
    untested: int
    may_restart: bool


class FunctionWorkspace:
    """Implements shared.environments.Workspace."""

    def __init__(self, problem: FunctionProblem, sampling: Sampling, tests: Tests) -> None:
        self.limits = Limits(
            turns=sampling.max_turns,
            tokens=sampling.max_completion_tokens,
            turn_tokens=sampling.max_turn_tokens,
            broken_in_a_row=0,
            broken_total=MAX_BROKEN,
        )
        self.notes: dict[str, str] = {}
        self._problem, self._sampling, self._tests = problem, sampling, tests
        self._state = Files(dict(problem.files))
        self._told = self._state.files
        self._given = _hash(problem.files)
        # Hash of files that failed -> the test's answer. None: the given files; the prompt says that they fail, so the first
        # test still runs.
        self._failed: dict[int, Observation | None] = {self._given: None}
        self._first_edit: dict[str, str] | None = None
        self._edits = self._repeats = 0  # edits that count; tests that used up no turn
        self._untested = 0  # edits since the last test
        self._may_restart = self._restarting = False

    @property
    def files(self) -> dict[str, str]:
        """Return the files as they are now."""
        return self._state.files

    def brief(self, *, continues: bool = False) -> Brief:
        if self._restarting:
            self._state, self._untested, self._restarting = Files(dict(self._problem.files)), 0, False
        self._may_restart = self._sampling.retry == "fresh" and not continues
        self._told = self._state.files
        return brief_of(self._problem, self._told)

    async def call(self, calls: Sequence[Call]) -> list[Result]:
        results: list[Result] = []
        for call in calls:
            result = await self._execute(call)
            results.append(result)
            if not result.ok or result.ends is not None:
                break
        last = results[-1]
        # After an end the rest counts as fine, though it did nothing; behind a broken call it counts as broken.
        skipped = [Result(call=c.id, tool=c.name, ok=last.ok, ran=False) for c in calls[len(results) :]]
        if last.ends is None:
            results[-1] = self._concluded(last)
        return results + skipped

    async def final(self, text: str) -> Result | None:
        """Refuse it: the work is submitted by a call."""
        return self._concluded(
            Result(tool=Tool.submit, ok=False, text="Found no call. Allowed: edit, undo, test, submit.")
        )

    async def submission(self) -> Submission:
        return Submission(files=self._state.files, first_edit_files=self._first_edit)

    async def save(self) -> bytes | None:
        return msgspec.msgpack.encode(
            _Saved(
                self._state.files,
                self._state.past,
                self._told,
                self._failed,
                self._first_edit,
                self._edits,
                self._repeats,
                self._untested,
                self._may_restart,
            )
        )

    async def restore(self, saved: bytes) -> Brief:
        try:
            found = msgspec.msgpack.decode(saved, type=_Saved)
        except msgspec.MsgspecError as error:
            raise Unrestorable(f"the workspace of a function: {error}") from None
        self._state, self._told = Files(found.files, found.past), found.told
        self._failed, self._first_edit = found.failed, found.first_edit
        self._edits, self._repeats, self._untested = found.edits, found.repeats, found.untested
        self._may_restart = found.may_restart
        return brief_of(self._problem, self._told)

    async def close(self) -> None:
        return None

    def _concluded(self, last: Result) -> Result:
        """Return the result that answers the turn, marked where the agent is to forget it and begin again."""
        if last.passed:
            self._may_restart = False
        failed = not last.ok or last.passed is False
        self._restarting = self._may_restart and failed
        return replace(last, restart=self._restarting)

    async def _execute(self, call: Call) -> Result:
        if call.error is not None:
            return _failed(call, call.error)
        if call.name == Tool.submit:
            fault = "gave_up" if self._known_to_fail(_hash(self._state.files)) else ""
            return Result(call=call.id, tool=call.name, fault=fault, ends=StopReason.submitted)
        if call.name == Tool.test:
            return await self._test(call)
        if call.name == Tool.edit and self._edits >= self._sampling.max_edits:
            return Result(call=call.id, tool=call.name, ends=StopReason.turn_limit)
        try:
            if call.name == Tool.edit:
                self._edit(call)
            elif call.name == Tool.undo:
                self._state = self._state.undo()
            else:
                raise EditError(f"{call.name} was not asked for")
        except EditError as error:
            return _failed(call, str(error))
        return Result(
            call=call.id,
            tool=call.name,
            text=told(self._problem, self._state.files),
            detail=Observation(Tool(call.name)),
        )

    def _edit(self, call: Call) -> None:
        """Apply an edit and count it. Raises EditError."""
        given = call.arguments
        action = Action(Tool.edit, 0, 0, line=given["line"] - 1, old=given["old"], new=given["new"])
        self._state = self._state.edit(action)
        self._edits += 1
        self._untested += 1
        self._first_edit = self._first_edit or self._state.files

    async def _test(self, call: Call) -> Result:
        state, fault, free = _hash(self._state.files), "", False
        edits, self._untested = self._untested, 0
        if state in self._failed:
            fault = "repeated" if self._known_to_fail(state) else ""
            free = self._repeats < self._sampling.max_repeats
            if free:
                self._repeats += 1
                self._edits -= edits
        observation = self._failed.get(state) or await self._tests.run(self._problem, self._state.files)
        if observation.failing is not None and observation.got not in LOAD_ERRORS:
            self._failed[state] = observation
        return Result(
            call=call.id,
            tool=call.name,
            text=told(self._problem, self._state.files, observation),
            passed=observation.failing is None,
            detail=observation,
            fault=fault,
            free=free,
        )

    def _known_to_fail(self, state: int) -> bool:
        """Return whether the agent has seen these files fail. With retry=fresh it has forgotten every failure but that of the
        given files."""
        return state in self._failed and (self._sampling.retry == "append" or state == self._given)


def _failed(call: Call, error: str) -> Result:
    return Result(call=call.id, tool=call.name, ok=False, text=error)


def _hash(files: dict[str, str]) -> int:
    """Return the same number in every process, unlike `hash`: it is saved."""
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(sorted(files.items())))
