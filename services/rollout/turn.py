"""One generation as engines sample it, perhaps several of them, one behind the other. Pure.

Invariants:
- What an engine has sampled before it ended the generation, or died, stays: the next engine continues behind it.
- Of a model with experts, a token whose routing no engine has told is kept only as long as the next engine can tell it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.rollout.generation import Generation


@dataclass(slots=True)
class Turn:
    """`tokens`: the context. `max_new_tokens`: of the whole generation. `first_row`: routing rows before it are recorded already.
    `routed`: the model has experts. `sampled`: by all engines so far. `heard`: what the engine that is asked now has told."""

    tokens: list[int]
    max_new_tokens: int
    first_row: int
    stop_tokens: tuple[int, ...]
    routed: bool
    sampled: Generation | None = None
    heard: Generation | None = None

    @property
    def whole(self) -> Generation | None:
        """Return the generation if it is over, else None."""
        made = self.sampled
        if made is None or (made.finish == "abort" and len(made.tokens) < self.max_new_tokens):
            return None
        return made if made.finish != "abort" else replace(made, finish="length")

    @property
    def context(self) -> list[int]:
        """Return the ids that the next request sends."""
        return self.tokens if self.sampled is None else [*self.tokens, *self.sampled.tokens]

    @property
    def left(self) -> int:
        """Return how many tokens may still be sampled."""
        return self.max_new_tokens - (0 if self.sampled is None else len(self.sampled.tokens))

    @property
    def next_row(self) -> int:
        """Return the first routing row that the next request asks for."""
        return self.first_row + (0 if self.sampled is None else self.sampled.rows)

    def hear(self, piece: Generation) -> None:
        self.heard = piece if self.heard is None else self.heard.then(piece)

    def take(self, generation: Generation) -> None:
        """Add what an engine has sampled."""
        self.heard = None
        self.sampled = generation if self.sampled is None else self.sampled.then(generation)

    def told(self) -> Generation | None:
        """Return what the engine told of a request that it will not answer; None: nothing that can be continued."""
        heard, self.heard = self.heard, None
        if heard is not None and heard.tokens[-1] in self.stop_tokens:  # it was over
            return None if self.routed else replace(heard, finish="stop")
        return heard

    def kept(self) -> Generation | None:
        """Return what can be recorded of a generation that ends here: without tokens at its end whose routing nobody told."""
        made = self.sampled
        if made is None or not self.routed:
            return made
        n = max(0, min(len(made.tokens), self.first_row + made.rows + 1 - len(self.tokens)))
        if n == len(made.tokens):
            return made
        return made.first(n, made.rows, "abort") if n else None
