"""A `verifiers` environment: sums, with a tool that adds two numbers. The rubric pays for the result, and a little for the tool."""

import random
import re

import verifiers as vf
from datasets import Dataset


async def add(a: int, b: int) -> str:
    """Add two whole numbers.

    Args:
        a: the first
        b: the second
    """
    return str(a + b)


async def right(completion: vf.Messages, answer: str) -> float:
    """Pay 1 for the right number at the end."""
    numbers = re.findall(r"-?\d+", str(completion[-1].get("content") or ""))
    return float(bool(numbers) and numbers[-1] == answer)


async def asked(completion: vf.Messages) -> float:
    """Pay 1 for a call of the tool."""
    return float(any(message.get("tool_calls") for message in completion))


def load_environment(examples: int = 50, terms: int = 3, seed: int = 0) -> vf.Environment:
    """Return the environment. `terms`: numbers in a sum."""
    chance = random.Random(seed)
    sums = [[chance.randint(10, 99) for _ in range(terms)] for _ in range(examples)]
    rows = [{"question": f"What is {' + '.join(map(str, sum_))}?", "answer": str(sum(sum_))} for sum_ in sums]
    rubric = vf.Rubric(funcs=[right, asked], weights=[1.0, 0.25])
    return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[add], rubric=rubric, max_turns=6)
