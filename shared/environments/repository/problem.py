# ruff: noqa: RUF012 (msgspec copies mutable defaults)
"""Problems of kind `repository`: a source tree, an instruction, and hidden tests that decide."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Literal

import msgspec

from shared.contracts.run import Ref
from shared.contracts.trajectory import Change
from shared.environments.repository.levels import levels
from shared.problems.schema import Hidden, Problem
from shared.sandbox.contract import WORKSPACE


class RepositoryLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one attempt. 0 means: what the run's sampling says (turns, tokens), or no limit (turn_tokens, seconds)."""

    turns: int = 0  # generations
    tokens: int = 0  # sampled and observed, after the first prompt
    turn_tokens: int = 0  # sampled in one turn
    seconds: float = 0.0  # wall clock of the attempt
    command_s: float = 60.0  # wall clock of one command of the agent
    memory_mb: int = 2048
    disk_mb: int = 4096  # of all that is written
    processes: int = 128
    grading_s: float = 300.0  # wall clock of one grading


class RepositoryProblem(Problem, frozen=True, kw_only=True):
    """The public part. `tree`: the source tree, a tar.zst object in the object store. `prompt` is the instruction (the issue's
    text). `workdir`: where the agent starts, relative to the tree. `setup`: shell commands that run in the sandbox before the
    agent starts and before grading. `tools`: names of the tools that are offered; empty: the environment's usual ones.
    `image`: the root file system of the sandbox: a base (`base:NAME` or `base:DIGEST`), or an image of a Docker engine
    (`docker:REFERENCE`); empty: what the service's setting says, by default the programs of its own machine.
    `network`: `none`; or hosts that the agent's sandbox may reach; or `allow` with hosts and `credentials` with names
    (docs/sandboxes.md, "Network"). Grading has none.
    `commit`: the base commit, for people; empty: unknown. `origin`: the repository, or the data set and its row."""

    kind: Literal["repository"] = "repository"
    tree: Ref
    commit: str = ""
    workdir: str = "."
    image: str = ""
    setup: list[str] = []
    tools: list[str] = []
    network: str | list[str] | dict[str, list[str]] = "none"
    limits: RepositoryLimits = RepositoryLimits()

    @property
    def repository(self) -> str:
        return re.split(r"[@=]", self.origin)[0] or self.cell

    def levels(self, hidden: RepositoryHidden) -> list[str]:
        return levels(self, hidden)

    @property
    def folder(self) -> str:
        """The path of `workdir` in a sandbox, e.g. /workspace/src."""
        return folder_of(self.workdir)


def folder_of(workdir: str) -> str:
    """Return the path, in a sandbox, of a folder of the tree; `.` is the tree itself."""
    return str(PurePosixPath(WORKSPACE) / workdir)


class RepositoryHidden(Hidden, frozen=True, kw_only=True):
    """The hidden part. A submission is solved when every test of `fail_to_pass` and `pass_to_pass` is collected and passes.

    `tests`: path -> the tests' own files, which are put into the tree last, over whatever the agent left there.
    `runner`: what runs the tests, and how their names are written (shared.environments.repository.graders). `command`: for Python,
    the files to run; empty: those named in `fail_to_pass` and `pass_to_pass`. For others, options behind the runner's own.
    `protected`: glob patterns; changes to matching paths are ignored (`*` also matches `/`).
    `solution`: the changes that solve the problem, for the oracle check and for SFT traces; empty: none is known."""

    kind: Literal["repository"] = "repository"
    fail_to_pass: list[str]
    pass_to_pass: list[str] = []
    tests: dict[str, Change] = {}
    runner: Literal["pytest", "unittest", "node", "go", "cargo"] = "pytest"
    command: list[str] = []
    protected: list[str] = []
    solution: dict[str, Change] = {}
