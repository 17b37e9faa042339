"""Problems of kind `verifiers`: one example of the data set of a `verifiers` environment."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shared.problems.schema import Hidden, Problem


class VerifiersLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one attempt. 0 means: what the run's sampling says (turns, tokens, turn_tokens), or no limit (seconds).
    `scoring_s`: how long the rubric may take after the attempt's end."""

    turns: Annotated[int, Meta(ge=0, le=10_000)] = 0  # generations
    tokens: Annotated[int, Meta(ge=0, le=10_000_000)] = 0  # sampled and observed, after the first prompt
    turn_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 0  # sampled in one turn
    seconds: Annotated[float, Meta(ge=0, le=24 * 3600)] = 0.0  # wall clock of the attempt
    scoring_s: Annotated[float, Meta(ge=1, le=3600)] = 60.0
    memory_mb: Annotated[int, Meta(ge=64, le=1 << 20)] = 3000
    disk_mb: Annotated[int, Meta(ge=16, le=1 << 20)] = 4096
    processes: Annotated[int, Meta(ge=8, le=4096)] = 256


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names an environment and where it is installed.

    `environment`: its id, as `verifiers.load_environment` takes it. `arguments`: those of its `load_environment`. `split`: of its
    data sets. `folder`: the virtual environment that holds it, below the setting ETUDE_SANDBOX_AGENTS. `image`: as in kind
    `repository`. `network`: as in kind `repository`."""

    environment: Annotated[str, Meta(pattern=r"^[\w./-]+$")]
    arguments: dict[str, Any] = {}
    split: Literal["train", "eval"] = "train"
    folder: Annotated[str, Meta(pattern=r"^\w[\w.-]*$")] = "verifiers"
    image: str = ""
    network: str | list[str] | dict[str, list[str]] = "none"
    limits: VerifiersLimits = VerifiersLimits()


class VerifiersProblem(Problem, frozen=True, kw_only=True):
    """The public part. `source`: the environment. `index`: the example's, in its split. `digest`: of the example's prompt; an
    attempt at an example with another prompt is refused. `prompt` is for people and for the judge; the environment writes its
    own."""

    kind: Literal["verifiers"] = "verifiers"
    source: Source
    index: Annotated[int, Meta(ge=0)]
    digest: str


class VerifiersHidden(Hidden, frozen=True, kw_only=True):
    """The hidden part. `solved_at`: the reward from which an attempt counts as solved. The expected answer stays in the
    environment's data set."""

    kind: Literal["verifiers"] = "verifiers"
    solved_at: float = 1.0
