"""A small run as the services would leave it behind: messages on a bus, objects in a store. Its texts are hostile."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from services.trainer.base.tokenizer import train
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.graded import Finding, Graded, place, verdict_key
from shared.contracts.ids import attempt_prefix
from shared.contracts.run import Purpose, Ref, RunConfig
from shared.contracts.trajectory import Segment, Span, Trajectory, pack, pack_routing, unpack
from shared.environments.function.actions import Observation, Tool
from shared.objects.directory import DirectoryObjects
from shared.problems import Case, FunctionProblem
from shared.problems.pack import write
from shared.renderers.formats.compact_1 import Compact
from shared.weights.checkpoint_objects import upload_directory
from tests.ruling import status

RUN = "r-20260101T000000-abcd"
HOSTILE = "<script>alert(1)</script> \x1b[2J\x1b]0;owned\x07 \u202egnp.exe \u200b{{7*7}} '\"&"
PROBLEM = FunctionProblem(
    id="p-1",
    prompt=f"Repair it. {HOSTILE}",
    files={"f.py": f'def f(a):\n    """{HOSTILE}"""\n    return a - 1\n'},
    entry="f",
    visible=[Case(args="[1]", expected="2")],
    actual=["0"],
)


@dataclass
class World:
    state: Path
    objects: DirectoryObjects
    chat: Compact
    config: RunConfig
    base: Path

    @functools.cached_property
    def messages(self) -> list[tuple[t.Topic, str, msgspec.Struct]]:
        """A run of three steps with four attempts, in the order in which they would come."""
        said: list[tuple[t.Topic, str, msgspec.Struct]] = [
            (t.RUNS_STATE, RUN, status(RUN, "running", self.config.base)),
            (t.STEPS_COMMITTED, RUN, m.IncarnationStarted(run=RUN, incarnation=0, step=0, parent=-1)),
        ]
        for serial in range(4):
            published = m.PolicyPublished(
                run=RUN, serial=serial, incarnation=0, step=serial, parent=serial - 1, manifest=self.config.base
            )
            said.append((t.POLICIES_PUBLISHED, RUN, published))
            applied = m.PolicyApplied(run=RUN, replica="engine-0", url="http://x", serial=serial, pause_s=0.03)
            said.append((t.POLICIES_APPLIED, "engine-0", applied))
            scored = self.scored(f"a-{serial}", version=serial, solved=serial > 1)
            said.append((t.ROLLOUTS_SCORED, scored.key.attempt, scored))
            if serial:
                metrics = {"entropy": 1.0 / serial, "mismatch_k3": 0.001 * serial, "prefix_saved_share": 0.5}
                metrics |= {f"mismatch_k3_version_{serial}": 0.1, "seconds_fetch": 0.2, "seconds_train": 1.0}
                step = m.StepCommitted(
                    run=RUN,
                    incarnation=0,
                    step=serial,
                    serial=serial,
                    groups={f"g-{serial}": serial - 1},
                    metrics=metrics,
                )
                said.append((t.STEPS_COMMITTED, RUN, step))
        said.append(
            (t.ALERTS, RUN, m.Alert(run=RUN, name="drift", severity="warning", what=HOSTILE, examples=[HOSTILE]))
        )
        figures = {"pass_at_1": 0.31, "greedy": 0.4}
        report = self.config.base
        said.append(
            (t.EVALS_FINISHED, RUN, m.EvalFinished(run=RUN, eval="before", serial=0, report=report, figures=figures))
        )
        return said

    def scored(self, attempt: str, *, version: int, solved: bool, purpose: Purpose = Purpose.train) -> m.RolloutScored:
        key = m.AttemptKey(attempt=attempt, epoch=1, group=f"g-{version}", problem="p-1", purpose=purpose)
        verdict = m.Verdict(solved=solved, passed=3 if solved else 1, total=3, error="" if solved else HOSTILE)
        trajectory = self.trajectory(attempt, version)
        broken = max(unpack(self.objects.get(trajectory)).segments[0].spans, key=lambda span: span.start)
        findings = {
            "broken_tool_call": Finding(7.0, [f"{place(0, broken.start, broken.end)}: broken edit {HOSTILE}"]),
            "todo_unfinished": Finding(1.0, [f"left open: {HOSTILE}", f"{place(0, 1, 2)}: nowhere"]),
        }
        graded = Graded(verdict=verdict, findings=findings, grader="grader")
        self.objects.put(verdict_key(RUN, key, trajectory), msgspec.json.encode(graded))
        return m.RolloutScored(
            run=RUN,
            key=key,
            verdict=verdict,
            reward=0.9 if solved else -0.05,
            terms={"solved": 1.0, "length": -0.1} if solved else {"broken_tool_call": -0.05},
            reward_config="default",
            trajectory=trajectory,
            effort=m.Effort(tool_call_tokens=20, tool_calls=2, turns=2),
            stop=m.StopReason.submitted,
            oldest_version=version,
        )

    def trajectory(self, attempt: str, version: int) -> Ref:
        """Prompt, an edit and a test, what the test said, submit. Token t goes to the experts (t, t + 1) mod 251 of the first MoE
        layer and to 251 and 252 of the second."""
        chat = self.chat
        edit = chat.edit_call(2, "return a - 1", "return a + 1")
        assert edit is not None
        parts = [
            (chat.prompt(PROBLEM, PROBLEM.files), "prompt", 0, True),
            ([*edit, chat.test], "tool_call", 1, True),
            (chat.observation(Observation(Tool.test, failing=0, got=HOSTILE)), "tool_output", 1, True),
            ([chat.edit, *chat.encode(HOSTILE), chat.submit], "tool_call", 2, False),
        ]
        tokens, mask, spans = [], [], []
        for ids, role, turn, ok in parts:
            spans.append(Span(start=len(tokens), end=len(tokens) + len(ids), role=role, turn=turn, ok=ok))
            tokens += ids
            mask += [role == "tool_call"] * len(ids)
        T = len(tokens)
        sampled = np.array(mask)
        segment = Segment(
            tokens=np.array(tokens, np.int32),
            loss_mask=sampled,
            logprobs=np.where(sampled, -np.linspace(0, 8, T), 0).astype(np.float32),
            versions=np.where(sampled, version, -1).astype(np.int32),
            oldest_kv_version=version,
            spans=spans,
        )
        rows = np.array([[[t % 251, (t + 1) % 251], [251, 252]] for t in range(T - 1)], np.uint8)
        prefix = attempt_prefix(RUN, attempt, 1)
        trajectory = Trajectory(
            key=m.AttemptKey(attempt=attempt, epoch=1, group=f"g-{version}", problem="p-1"),
            stop=m.StopReason.submitted,
            temperature=1.0,
            effort=m.Effort(),
            segments=[segment],
            files={"f.py": PROBLEM.files["f.py"].replace("a - 1", "a + 1")},
            routing=self.objects.put(f"{prefix}/routing-0.safetensors.zst", pack_routing([rows])),
        )
        return self.objects.put(f"{prefix}/trajectory-0.safetensors.zst", pack(trajectory))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    state = tmp_path_factory.mktemp("state")
    objects = DirectoryObjects(state / "objects")
    base = tmp_path_factory.mktemp("base")
    lines = [line.strip() for path in Path(__file__).parent.glob("*.py") for line in path.read_text().splitlines()]
    train(lines, base / "tokenizer.json", vocabulary=512)
    (base / "config.json").write_text("{}")
    (base / "etude.json").write_text(json.dumps({"format": "compact-1", "context": 2048}))
    (base / "model.safetensors").write_bytes(b"weights")
    lines_of_pack = objects.put("packs/p", write([PROBLEM]))
    config = RunConfig(
        run=RUN,
        base=upload_directory(objects, "checkpoints/base", base),
        pack=lines_of_pack,
        pack_hidden=lines_of_pack,
    )
    objects.put(f"runs/{RUN}/config.json", msgspec.json.encode(config))
    return World(state, objects, Compact.load(base), config, base)
