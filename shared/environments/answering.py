"""Checks that an environment answered everything that it was asked. Environments come from other packages, too."""

from __future__ import annotations

from collections.abc import Sequence

from shared.environments import InfrastructureError


def require_one_each(asked: Sequence[object], answers: Sequence[object], what: str) -> None:
    """Raise InfrastructureError if there is not one answer for each thing that was asked. `what`: what was asked for, such as
    "verdicts of environment 'sum'"."""
    if len(answers) != len(asked):
        raise InfrastructureError(f"found {len(answers)} {what}; allowed: {len(asked)}, one each, in order")
