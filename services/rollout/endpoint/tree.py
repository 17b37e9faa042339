"""The calls of one attempt as a tree: each node appends context and sampled tokens behind its parent's. Pure.

    opening ─ answer 1 ─ results ─ answer 2 ─ results ─ answer 3        a conversation
                       └ results ─ answer 4                             went on from answer 1 a second time
    opening ─ answer 5                                                  a sub-agent, or a compacted conversation

A path from a root to a leaf is one segment of the trajectory. A node that several paths share is trained in the first of them, in
order of their leaves; in the others its tokens are context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.rollout.generation import Generation
from services.rollout.recorder import Part, Recorder


@dataclass(slots=True, eq=False)
class Node:
    """One answer. `appended`: the ids between the parent's end and the answer, or the whole opening where there is no parent.
    `length`: of all ids up to the answer's end. `tool`: what the appended ids are results of, for people."""

    parent: Node | None
    appended: list[int]
    generation: Generation
    parts: Sequence[Part]
    turn: int
    length: int
    tool: str = ""
    fault: str = ""
    children: list[Node] = field(default_factory=list)

    @property
    def path(self) -> list[Node]:
        """Return the nodes from the root to this one."""
        path = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1]

    @property
    def before(self) -> list[int]:
        """Return all ids before the answer."""
        *earlier, _ = path = self.path
        ids = [id for node in earlier for id in (*node.appended, *node.generation.tokens)]
        return ids + path[-1].appended

    @property
    def rows(self) -> int:
        """Return how many routing rows are known of the ids up to the answer's end: all but the last id's."""
        return 0 if self.generation.experts_RLK is None else self.length - 1


class Tree:
    """`oldest_version`, `oldest_kv_version`, `newest_version`: among all sampled tokens; -1 before the first."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.oldest_version = self.oldest_kv_version = self.newest_version = -1

    def add(
        self,
        parent: Node | None,
        appended: Sequence[int],
        generation: Generation,
        parts: Sequence[Part],
        turn: int,
        *,
        tool: str = "",
        fault: str = "",
    ) -> Node:
        """Record an answer. Raises ValueError where its arrays do not fit, or where nothing stands before it."""
        n, before = len(generation.tokens), (parent.length if parent is not None else 0) + len(appended)
        if not n or not before:
            raise ValueError(
                f"tree.add: found {n} sampled tokens behind {before}; allowed: 1 and more behind 1 and more"
            )
        if generation.logprobs_N.shape != (n,) or generation.versions_N.shape != (n,):
            raise ValueError(
                f"tree.add: {n} tokens, log-probabilities {generation.logprobs_N.shape}, versions "
                f"{generation.versions_N.shape}"
            )
        rows = generation.experts_RLK
        expected = before + n - 1 - (parent.rows if parent is not None else 0)
        if rows is not None and len(rows) != expected:
            raise ValueError(f"tree.add: {len(rows)} routing rows, expected {expected}")
        node = Node(parent, list(appended), generation, parts, turn, before + n, tool, fault)
        if parent is not None:
            parent.children.append(node)
        self.nodes.append(node)
        self._count(generation)
        return node

    def shared(self, ids: Sequence[int]) -> int:
        """Return how many ids, from the first on, an opening has in common with an earlier one."""
        roots = (node.appended for node in self.nodes if node.parent is None)
        return max((_common(root, ids) for root in roots), default=0)

    def recorder(self) -> Recorder:
        """Return a recorder that holds one segment for each leaf."""
        recorder = Recorder()
        trained: set[int] = set()
        for leaf in (node for node in self.nodes if not node.children):
            for i, node in enumerate(leaf.path):
                if i == 0:
                    recorder.begin(node.appended)
                else:
                    recorder.observed(node.appended, node.turn, tool=node.tool)
                first = id(node) not in trained
                recorder.sampled(node.generation, node.parts, node.turn, fault=node.fault, trained=first)
                trained.add(id(node))
        return recorder

    def _count(self, generation: Generation) -> None:
        first = self.newest_version < 0
        oldest = int(generation.versions_N.min())
        self.oldest_version = oldest if first else min(self.oldest_version, oldest)
        kv = generation.oldest_kv_version
        self.oldest_kv_version = kv if first else min(self.oldest_kv_version, kv)
        self.newest_version = max(self.newest_version, int(generation.versions_N.max()))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def cut(generation: Generation, n: int) -> Generation:
    """Return the first n sampled tokens, as if sampling had stopped there. Tokens are sampled one after another, so those that
    were kept are distributed alike."""
    left = len(generation.tokens) - n
    return generation if left <= 0 else generation.first(n, generation.rows - left, "stop")
