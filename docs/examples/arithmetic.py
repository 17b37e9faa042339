"""An environment of one's own: the agent answers a sum with the tool `answer`."""

from typing import Literal

from shared.contracts.messages import StopReason, Verdict
from shared.contracts.trajectory import Submission
from shared.environments import Brief, Environment, Limits, Message, Result, ToolSpec, Workspace
from shared.problems import Hidden, Problem

SCHEMA = {"type": "object", "properties": {"value": {"type": "integer"}}, "required": ["value"]}
ANSWER = ToolSpec("answer", "Give the answer. Ends the attempt.", SCHEMA, "ends")


class Sum(Problem, frozen=True, kw_only=True):
    kind: Literal["arithmetic"] = "arithmetic"


class SumHidden(Hidden, frozen=True, kw_only=True):
    kind: Literal["arithmetic"] = "arithmetic"
    value: int


class Sheet(Workspace):  # one attempt: calls in, results out, and the work as data
    def __init__(self, brief, sampling):
        self.limits = Limits(turns=sampling.max_turns, tokens=sampling.max_completion_tokens)
        self.notes, self._brief, self._answer = {}, brief, ""

    def brief(self, *, continues=False):
        return self._brief

    async def call(self, calls):
        good = [call for call in calls if call.error is None]
        self._answer = str(good[0].arguments["value"]) if good else self._answer
        ends = StopReason.submitted if good else None
        return [Result(c.id, c.name, c.error or "", ok=c.error is None, ends=ends) for c in calls]

    async def submission(self):
        return Submission(files={"answer": self._answer})


class Arithmetic(Environment[Sum, SumHidden]):
    kind, problem, hidden = "arithmetic", Sum, SumHidden

    def brief(self, problem):
        return Brief((Message("user", problem.prompt),), (ANSWER,))

    async def open(self, problem, sampling):
        return Sheet(self.brief(problem), sampling)

    async def grade(self, items):
        right = [item.submission.files.get("answer") == str(item.hidden.value) for item in items]
        return [Verdict(solved=ok, passed=int(ok), total=1) for ok in right]

    def oracle(self, problem, hidden):
        return Submission(files={"answer": str(hidden.value)})
