"""A run whose attempts work on a repository, with a small ChatML model's tokenizer. The attempt is written by hand, turn by turn,
and recorded as the rollout worker records one. Its texts are hostile, long, and hold characters that tokens cut."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from services.rollout.generation import Generation
from services.rollout.recorder import Part, Recorder
from shared.contracts import messages as m
from shared.contracts.graded import Finding, Graded, place, verdict_key
from shared.contracts.ids import attempt_prefix
from shared.contracts.run import Purpose, Ref, RunConfig
from shared.contracts.trajectory import Change, Trajectory, pack
from shared.environments import Brief, Places, Result
from shared.environments.registry import Environments
from shared.environments.repository.problem import RepositoryLimits, RepositoryProblem
from shared.environments.repository.trees import pack_tree, store_tree
from shared.objects.directory import DirectoryObjects
from shared.problems.pack import write as write_pack
from shared.renderers import Tail
from shared.renderers.formats.chatml import ChatML
from shared.weights.checkpoint_objects import upload_directory
from tests.renderer_checkpoints import QWEN, write
from tests.unit.console.conftest import HOSTILE, RUN, World

WALLET = '''"""Money in a wallet."""

from rates import RATES


class Wallet:
    def __init__(self, currency="EUR"):
        self.currency = currency
        self.amount = 0

    def pay(self, amount, currency):
        """Take an amount out, in any currency."""
        self.amount += amount * RATES[currency]
        return self.amount

    def __repr__(self):
        return f"<Wallet {self.amount} {self.currency}>"
'''
FIXED = WALLET.replace(
    "self.amount += amount * RATES[currency]", "self.amount -= self._converted(amount, currency)"
).replace(
    "    def __repr__",
    "    def _converted(self, amount, currency):\n        if currency not in RATES:\n            raise KeyError(currency)\n"
    "        return amount * RATES[currency]\n\n    def __repr__",
)
FILES = {
    "wallet.py": WALLET,
    "rates.py": 'RATES = {"EUR": 1.0, "USD": 0.9}\n',
    "old.py": "# no longer used\n",
    "tests/test_wallet.py": "from wallet import Wallet\n\n\ndef test_empty():\n    assert Wallet().amount == 0\n",
}
PROMPT = (
    "Paying from a wallet makes it richer.\n\nRepair `Wallet.pay`, and raise KeyError for a currency without a rate. "
    + HOSTILE
)
CHANGES = {
    "wallet.py": Change(text=FIXED),
    "old.py": Change(),
    "scripts/check.sh": Change(text="#!/bin/sh\nexec python -m pytest -q\n", executable=True),
    "logo.png": Change(data=b"\x89PNG\x0d\x0a\xff\x00" * 40),
}
PYTEST = (
    "============================= test session starts =============================\n"
    + "\n".join(f"tests/test_wallet.py::test_{i} {'PASSED' if i % 9 else 'FAILED'}" for i in range(90))
    + "\n\nE       assert -90.0 == 90.0\n=========== 10 failed, 80 passed in 0.31s ===========\n[exit code 1]"
)
ASK = "Your context is nearly full. Summarise for yourself what you found out."


def call(name: str, **arguments: object) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + "\n</tool_call>"


GREP = call("grep", pattern="Wallet\\(", path=".")
READ = call("read", path="wallet.py")
OLD, NEW = ("\n".join(text.splitlines()[slice(12, end)]) + "\n" for text, end in ((WALLET, 14), (FIXED, 19)))
EDIT = call("edit", path="wallet.py", old=OLD, new=NEW)
BROKEN = '<tool_call>\n{"name": "shell", "arguments": {"command": "python -m pytest -q}\n</tool_call>'
SHELL = call("shell", command="python -m pytest -q")
MISSING = call("edit", path="rates.py", old="GBP", new="CHF")
SCRIPT = call("write", path="scripts/check.sh", content="#!/bin/sh\nexec python -m pytest -q\n" + "# line\n" * 40)
# What is sampled, what it is answered, and which of the calls were executed.
THOUGHT = "<think>\nFirst look at where wallets are used.\nThen read the class.\n</think>\n\nI look around. 财布 👛\n"
NUMBERED = "\n".join(f"{n:>6}\t{line}" for n, line in enumerate(WALLET.splitlines(), 1))
TURNS: list[tuple[str, list[str], list[bool]]] = [
    (f"{THOUGHT}{GREP}\n{READ}", ["tests/test_wallet.py:5:    assert Wallet().amount == 0", NUMBERED], [True, True]),
    (f"The sign is wrong, and the rate is not checked.\n{EDIT}", ["edited wallet.py"], [True]),
    (BROKEN, ["the call: Unterminated string. A valid call: <tool_call>…"], [False]),
    (SHELL, [PYTEST], [True]),
    (f"{MISSING}\n{SCRIPT}", ["rates.py: 'old' does not occur", f"created scripts/check.sh {HOSTILE}"], [False, True]),
]
SUMMARY = "I repaired Wallet.pay; the tests still have to be run once more."
LAST = call("submit")


@dataclasses.dataclass
class RepositoryWorld(World):
    """The same run as World, but every attempt is at a repository. `problem`: the one that is in its pack."""

    chat: ChatML  # type: ignore[assignment]
    problem: RepositoryProblem

    def scored(self, attempt: str, *, version: int, solved: bool, purpose: Purpose = Purpose.train) -> m.RolloutScored:
        key = m.AttemptKey(attempt=attempt, epoch=1, group=f"g-{version}", problem=self.problem.id, purpose=purpose)
        verdict = m.Verdict(solved=solved, passed=3 if solved else 1, total=3, error="" if solved else "AssertionError")
        trajectory = self.recorded(key, version)
        broken = next(span for span in trajectory.segments[0].spans if span.role == "tool_call" and not span.ok)
        finding = Finding(1.0, [f"{place(0, broken.start, broken.end)}: broken call"])
        graded = Graded(verdict=verdict, findings={"broken_tool_call": finding}, grader="grader")
        ref = self.stored(trajectory)
        self.objects.put(verdict_key(RUN, key, ref), msgspec.json.encode(graded))
        return m.RolloutScored(
            run=RUN,
            key=key,
            verdict=verdict,
            reward=0.9 if solved else -0.05,
            terms={"solved": 1.0 if solved else 0.0, "broken_tool_call": -0.05},
            reward_config="default",
            trajectory=ref,
            effort=m.Effort(tool_call_tokens=420, tool_output_tokens=1200, tool_calls=8, turns=7, summaries=1),
            stop=m.StopReason.submitted,
            oldest_version=version,
        )

    def stored(self, trajectory: Trajectory) -> Ref:
        prefix = attempt_prefix(RUN, trajectory.key.attempt, 1)
        return self.objects.put(f"{prefix}/trajectory-0.safetensors.zst", pack(trajectory))

    def brief(self) -> Brief:
        return Environments(Places(objects=self.objects)).of(self.problem).brief(self.problem)

    def recorded(self, key: m.AttemptKey, version: int) -> Trajectory:
        recorder, brief = Recorder(), self.brief()
        recorder.begin(self.chat.opening(brief))
        turn = 0
        for said, answered, ok in TURNS:
            turn += 1
            results = self._sample(recorder, said, turn, version, ok)
            told = [dataclasses.replace(r, text=text) for r, text in zip(results, answered, strict=True)]
            self._observe(recorder, brief, turn, told, ok)
        asked = self.chat.vocabulary.ids(f"<|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n")
        recorder.observed(asked, turn, "prompt", "summary")
        turn += 1
        ids = self.chat.vocabulary.ids(f"{SUMMARY}<|im_end|>")
        recorder.sampled(self._generation(ids, version), [Part(0, len(ids), "summary", "summary")], turn)
        kept = self.chat.kept(ids)
        recorder.begin(self.chat.opening(brief, kept), kept)
        turn += 1
        self._sample(recorder, SHELL, turn, version + 1, [True])
        self._observe(recorder, brief, turn, [Result("x", "shell", "4 passed in 0.02s", passed=True)], [True])
        self._sample(recorder, f"Done, and the tests pass.\n{LAST}", turn + 1, version + 1, [True])
        return Trajectory(
            key=key,
            stop=m.StopReason.submitted,
            temperature=1.0,
            effort=m.Effort(),
            segments=recorder.segments(),
            changes=CHANGES,
            notes={"todo": "- [x] read\n- [ ] test", "worker": "rollout-0"},
        )

    def _sample(self, recorder: Recorder, said: str, turn: int, version: int, ok: Sequence[bool]) -> list[Result]:
        ids = self.chat.vocabulary.ids(f"{said}<|im_end|>")
        calls = self.chat.reading(ids, recorder.context).calls
        assert len(calls) == len(ok)
        parts = [Part(c.start, c.end, "tool_call", c.name, fine) for c, fine in zip(calls, ok, strict=True)]
        recorder.sampled(self._generation(ids, version), parts, turn)
        return [Result(c.id, c.name, ok=fine) for c, fine in zip(calls, ok, strict=True)]

    def _observe(self, recorder: Recorder, brief: Brief, turn: int, results: list[Result], ok: Sequence[bool]) -> None:
        answer = self.chat.answers(Tail(recorder.context, [self.chat.stop_tokens[0]], brief), results)
        assert answer is not None
        last = results[-1]
        recorder.observed(answer, turn, "tool_output", last.tool, ok=all(ok), passed=bool(last.passed))

    def _generation(self, ids: list[int], version: int) -> Generation:
        logprobs = -np.random.default_rng(len(ids)).exponential(0.7, len(ids)).astype(np.float32)
        return Generation(ids, logprobs, np.full(len(ids), version, np.int32), version)


def repository_world(state: Path) -> RepositoryWorld:
    objects = DirectoryObjects(state / "objects")
    base = write(state / "base", QWEN, card={"format": "chatml", "context": 32_768, "thinking": "model"})
    (base / "config.json").write_text("{}")
    (base / "model.safetensors").write_bytes(b"weights")
    folder = state / "tree"
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    problem = RepositoryProblem(
        id="wallet-1",
        prompt=PROMPT,
        tree=store_tree(objects, pack_tree(folder)),
        commit="0a1b2c3",
        origin="example/wallet",
        setup=["pip install -e ."],
        limits=RepositoryLimits(turns=40, tokens=16_000),
    )
    lines = objects.put("packs/p", write_pack([problem]))
    config = RunConfig(run=RUN, base=upload_directory(objects, "checkpoints/base", base), pack=lines, pack_hidden=lines)
    objects.put(f"runs/{RUN}/config.json", msgspec.json.encode(config))
    return RepositoryWorld(state, objects, ChatML.load(base), config, base, problem)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> RepositoryWorld:
    return repository_world(tmp_path_factory.mktemp("repository"))
