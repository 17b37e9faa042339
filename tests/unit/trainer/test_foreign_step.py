"""One training step on attempts of an agent of others: several branches, one reward, every sampled token once."""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.rollout.endpoint.recording import Recording
from shared.chat import Asked, Turn
from tests.training import require_a_step, stored
from tests.unit.endpoint.world import recording, renderer

TASK, CHILD = Turn("user", "Mend it."), Turn("user", "Count files.")


async def branched(recorded: Recording) -> None:
    """A conversation, a second answer to its first result, and a sub-agent: three segments."""

    async def ask(*turns: Turn) -> Turn:
        asked = Asked(turns)
        return (await recorded.answer(asked, recorded.prompt(asked))).turn

    first = await ask(TASK)
    for more in ("Go on.", "Do it otherwise."):
        await ask(TASK, first, Turn("user", more))
    await ask(CHILD)


def test_a_step_trains_each_sampled_token_of_all_branches_once_with_the_attempts_reward(tmp_path: Path) -> None:
    chat = renderer(tmp_path)
    trajectories, sampled = [], 0
    for number in range(2):
        recorded, policy = recording(chat, [f"reply {number}", "so", "otherwise", "seven"])
        asyncio.run(branched(recorded))
        trajectories.append(stored(number, recorded.tree.recorder(), recorded.effort))
        sampled += sum(len(tokens) for _, tokens in policy.seen)
    assert [len(trajectory.segments) for trajectory in trajectories] == [3, 3]
    require_a_step(trajectories, [1.0, 0.0], chat.vocab_size, sampled)
