"""The seeded policy: completions as a function of the attempt, the number of its generation and the request, nothing else.

It knows the solution. Weights decide how often it uses it, so that attempts end in every way that the agent's doing allows.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

from tests.guard.compact import Writer
from tests.guard.problems import Pair

Change = tuple[int, str, str]  # line from zero, its text before and after, both without indentation
WRONG = 2  # wrong edits of a problem: few, so that attempts come back to what failed
OTHERS = ("+", "-", "<", ">=", "0", "1", "None", "not", "(")
THOUGHT = "  # hmm, let me think"

# What an attempt does next: at its start, after a failure or after an edit nobody tested.
MOVES = {
    "right test": 14, "right submit": 2, "wrong test": 20, "wrong wrong test": 5, "undo right test": 5, "undo wrong test": 3,
    "undo test": 2, "test": 6, "submit": 2, "misfit test": 1, "broken test": 1, "broken": 1, "babble": 2, "endless": 1,
    "wrong": 4, "right": 3, "right stop": 1, "thought right test": 3, "thought wrong submit": 2, "summary": 2,
    "wrong undo right test": 2, "misfit": 1, "wrong undo undo": 1, "empty": 1, "loop test": 2, "import test": 4,
    "wrong misfit": 4, "wrong broken": 2,
}  # fmt: skip
# After `<pass>`: a test that passed, or an edit that was applied.
PASSED = {
    "submit": 60, "test": 6, "wrong test": 8, "undo submit": 4, "endless": 2, "babble": 3,
    "wrong submit": 3, "broken": 2,
}  # fmt: skip
SUMMARIES = {"edits done": 60, "done": 10, "edits": 8, "test": 5, "long done": 8, "endless": 6, "babble": 4}
# A temper makes some moves more likely, for all of an attempt.
TEMPERS: tuple[tuple[str, dict[str, float]], ...] = (
    ("even", {}),
    ("able", {"right test": 4, "undo right test": 3, "thought right test": 3}),
    ("stubborn", {"test": 8, "undo test": 3, "undo wrong test": 5, "wrong test": 8, "loop test": 5, "submit": 0.5,
                  "right test": 0.1}),
    ("clumsy", {"broken": 50, "broken test": 40, "misfit test": 30, "babble": 6, "right test": 0.2}),
    ("busy", {"wrong": 10, "wrong wrong test": 6, "undo wrong test": 3, "right test": 0.1, "submit": 0.1}),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Completion:
    """`tokens` as sampled. `finish`: stop, or length where `max_new_tokens` cut them."""

    tokens: list[int]
    finish: str


@dataclass(slots=True)
class Policy:
    """For one attempt. `rng` decides the attempt's temper; each generation has one of its own."""

    writer: Writer
    pair: Pair
    rng: random.Random
    right: list[Change] = field(init=False)
    wrong: list[Change] = field(init=False)
    temper: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        problem, hidden = self.pair
        self.temper = self.rng.choice(TEMPERS)[1]
        (broken,) = problem.files.values()
        self.right = changes(broken, next(iter(hidden.solution.values()), broken))
        self.wrong = wrong_changes(broken, random.Random(problem.id))

    def complete(self, context: list[int], room: int, rng: random.Random) -> Completion:
        """Sample until a stop token, the end of what the policy has to say, or `room` tokens."""
        ids = self.writer.ids
        if context[-1:] == [ids["sum"]]:
            move = _draw(SUMMARIES, {}, rng)
        elif context[-3:] == [ids["obs"], ids["pass"], ids["end"]]:
            move = _draw(PASSED, {}, rng)
        else:
            move = _draw(MOVES, self.temper, rng)
        tokens = [token for word in move.split() for token in self.say(word, rng)]
        # A real engine ends with the first stop token, too.
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.writer.stops), len(tokens))
        tokens = tokens[:end]
        return Completion(tokens[:room], "stop" if len(tokens) <= room else "length")

    def say(self, word: str, rng: random.Random) -> list[int]:
        writer, ids = self.writer, self.writer.ids
        match word:
            case "test" | "submit" | "undo" | "done":
                return [ids[word]]
            case "right":
                return [token for change in self.right for token in writer.change(*change)]
            case "wrong":
                return writer.change(*rng.choice(self.wrong)) if self.wrong else [ids["undo"]]
            case "thought":
                line, before, _ = rng.choice(self.wrong or self.right)
                return writer.edit(line, before, before + THOUGHT)
            case "loop":
                return self.last_line("return sum(0 for _ in iter(int, 1))")
            case "import":  # of the module that the function was taken from, which the sandbox refuses
                module = self.pair[0].origin.partition(":")[2].partition(":")[0] or "colorsys"
                return self.last_line(f"return __import__({module!r}).__name__")
            case "edits":
                return [token for _ in range(rng.randint(1, 3)) for token in self.say("wrong", rng)[1:]]
            case "summary":  # nobody asked for one
                return [*self.say("edits", rng), ids["done"]]
            case "stop":  # an end of text, where the policy has learnt one
                return [ids["eos"]]
            case "empty":  # not quite: an engine samples one token at least
                return [ids["end"]]
            case "misfit":
                return writer.edit(rng.randrange(3), "zq~", "1")
            case "babble":
                return [rng.randrange(writer.size) for _ in range(rng.randint(1, 12))]
            case "long" | "endless":
                count = rng.randint(300, 700) if word == "long" else 4000
                return [token for _ in range(count) if (token := rng.randrange(writer.size)) not in writer.stops]
        assert word == "broken", word
        return self.broken(rng)

    def last_line(self, after: str) -> list[int]:
        """Replace the last line of the file as it was given."""
        (text,) = self.pair[0].files.values()
        lines = text.rstrip("\n").split("\n")
        return self.writer.change(len(lines) - 1, lines[-1].strip(), after)

    def broken(self, rng: random.Random) -> list[int]:
        """A call that cannot be read or applied, each kind alike."""
        writer, ids = self.writer, self.writer.ids
        body = writer.text("x"), [ids["got"]], writer.text("y")
        line, end = [ids["L2"]], [ids["end"]]
        kinds = (
            [*body[0], *body[1], *body[2], *end],  # no line
            [*line, *body[0], *body[2], *end],  # no <got>
            [*line, *body[0], *body[1], *body[1], *body[2], *end],  # two
            [*line, *body[0], ids["undo"], *body[1], *body[2], *end],  # a special token in the text
            [*line, *body[0], *body[1], *body[2]],  # no end
            [*line, writer.not_utf8, *body[1], *body[2], *end],
            [*line, *body[1], *body[2], *end],  # an empty OLD
            [ids["L48"], *body[0], *body[1], *body[2], *end],  # beyond the file
            [*line, *writer.text(" "), *body[1], *writer.text("\n"), *end],  # a line break
            end,
        )
        return [ids["edit"], *rng.choice(kinds)]


def changes(broken: str, right: str) -> list[Change]:
    """The lines that differ; none where no edits lead from one text to the other."""
    old, new = broken.rstrip("\n").split("\n"), right.rstrip("\n").split("\n")
    if len(old) != len(new):
        return []
    return [(i, a.strip(), b.strip()) for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]


def wrong_changes(broken: str, rng: random.Random) -> list[Change]:
    """Single words replaced by another one of the file or of OTHERS."""
    lines = broken.rstrip("\n").split("\n")
    words = sorted(set(re.findall(r"[A-Za-z_]+", broken))) + list(OTHERS)
    made: list[Change] = []
    for _ in range(20 * WRONG):
        line = rng.randrange(min(len(lines), 48))
        text = lines[line].strip()
        found = list(re.finditer(r"[A-Za-z_]+|[0-9]|[-+*/<>=]+", text))
        if found and len(made) < WRONG:
            at, word = rng.choice(found), rng.choice(words)
            if at[0] != word:
                made.append((line, text, text[: at.start()] + word + text[at.end() :]))
    return made


def _draw(weights: dict[str, int], more: dict[str, float], rng: random.Random) -> str:
    return rng.choices(list(weights), [weight * more.get(move, 1) for move, weight in weights.items()])[0]
