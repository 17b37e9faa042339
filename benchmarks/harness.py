"""What the harness costs a turn: everything between a sampled token and the next request but the model and the tools.

128 attempts run at a time in one process, each with the shipped agent, recorder, ChatML renderer, argument checks and wire
format. The model answers at once with a call of 60 tokens or so, the tool with 2 KB of output; contexts grow to 8,000 tokens.
Every output is another one: lines of Python's standard library, read before the measurement. Each measurement begins with a
renderer that has encoded nothing yet. The figure is processor time of the process over all turns, so waiting does not count.
The limit is one millisecond.
"""

from __future__ import annotations

import asyncio
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.records import Bench
from services.rollout.agent import Agent
from services.rollout.engine_client import Request
from services.rollout.generation import Generation, parse
from shared.contracts.run import Sampling
from shared.contracts.trajectory import Submission
from shared.environments import Brief, Call, Limits, Message, Result, ToolSpec, Workspace
from shared.renderers.formats.chatml import Card, ChatML
from shared.renderers.vocabulary import Vocabulary
from tests.renderer_checkpoints import QWEN, tokenizer_of

ATTEMPTS, TURNS = 128, 12
OUTPUT_CHARACTERS = 2048
SAID = (
    'I read the file.\n<tool_call>\n{"name": "read", "arguments": {"path": "src/module.py", "start": 1}}\n</tool_call>'
)
READ = ToolSpec(
    "read",
    "Read lines of a file.",
    {
        "type": "object",
        "properties": {"path": {"type": "string"}, "start": {"type": "integer"}},
        "required": ["path"],
    },
)


@dataclass(slots=True)
class Instant:
    """A model that answers every request alike, through the wire format. It is asked nothing else."""

    reply: bytes
    stop_tokens: tuple[int, ...]

    @property
    def partial(self) -> Generation | None:
        return None

    async def generate(self, tokens: list[int], *, max_new_tokens: int, first_row: int) -> Generation:
        request = Request("a.0-1", tokens, 1.0, max_new_tokens, self.stop_tokens, None, first_row)
        request.body(routing=False)
        await asyncio.sleep(0)
        return parse(self.reply, prompt_tokens=len(tokens), first_row=first_row, routing=None)


class Reading(Workspace):
    """Answers each call with the next of the outputs."""

    def __init__(self, outputs: Iterator[str]) -> None:
        self.limits, self.notes = Limits(turns=TURNS, tokens=1 << 20), {}
        self.outputs = outputs

    def brief(self, *, continues: bool = False) -> Brief:
        return Brief((Message("system", "You are a coding agent."), Message("user", "Mend the totals.")), (READ,))

    async def call(self, calls: Sequence[Call]) -> list[Result]:
        return [Result(call.id, call.name, next(self.outputs), ok=call.error is None) for call in calls]

    async def submission(self) -> Submission:
        return Submission()


def outputs(number: int) -> list[str]:
    """Return so many outputs of a tool that reads files. No two of them are of the same lines."""
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        lines = path.read_text(errors="replace").splitlines()
        text = "\n".join(f"{n:4}  {line}" for n, line in enumerate(lines, 1))
        whole = len(text) // OUTPUT_CHARACTERS
        found += [text[i * OUTPUT_CHARACTERS : (i + 1) * OUTPUT_CHARACTERS] for i in range(whole)]
        if len(found) >= number:
            return found[:number]
    raise SystemExit(f"harness: found {len(found)} outputs in Python's standard library; expected {number}")


def renderer() -> ChatML:
    return ChatML(Vocabulary(tokenizer_of(QWEN)), Card(context=1 << 20))


def reply_of(chat: ChatML) -> bytes:
    ids = [*chat.vocabulary.ids(SAID), chat.stop_tokens[0]]
    meta = {
        "output_token_logprobs": [[-0.5, id, None] for id in ids],
        "weight_version": "7",
        "oldest_kv_version": 7,
        "finish_reason": {"type": "stop"},
    }
    return msgspec.json.encode({"output_ids": ids, "meta_info": meta})


def turn_ms(chat: ChatML, attempts: int) -> float:
    """Return milliseconds of processor time a turn."""
    model = Instant(reply_of(chat), chat.stop_tokens)
    texts = iter(outputs(attempts * TURNS))
    agents = [Agent(chat, model, Reading(texts), Sampling()) for _ in range(attempts)]

    async def all_of_them() -> None:
        await asyncio.gather(*(agent.run() for agent in agents))

    started = time.process_time()
    asyncio.run(all_of_them())
    spent = time.process_time() - started
    turns = sum(agent.effort.turns for agent in agents)
    if turns != attempts * TURNS or any(agent.effort.broken_tool_calls for agent in agents):
        raise SystemExit(f"harness: found {turns} turns or broken calls; expected {attempts * TURNS} and none")
    return spent / turns * 1000.0


def main() -> None:
    bench = Bench.start(__doc__)
    attempts = bench.pick(ATTEMPTS, 16)
    bench.measure(
        "harness.turn_cpu_ms",
        f"a turn of {attempts} attempts at a time, without model and tool",
        "ms",
        lambda: turn_ms(renderer(), attempts),
        against="at most 1 ms",
    )
    bench.end()


if __name__ == "__main__":
    main()
