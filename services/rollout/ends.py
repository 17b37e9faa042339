"""How an attempt ends: typed exceptions, raised anywhere in the loop and turned into a StopReason in one place."""

from __future__ import annotations

from typing import ClassVar

from shared.contracts.messages import StopReason


class InfrastructureError(Exception):
    """Not the agent's doing; the text says whose. The attempt has no outcome and is asked for again."""


class End(Exception):
    stop: ClassVar[StopReason]


class Submitted(End):
    stop = StopReason.submitted


class TurnLimit(End):
    """Also: one edit more than allowed."""

    stop = StopReason.turn_limit


class ContextFull(End):
    """The token budget of the attempt or the context of the model is spent."""

    stop = StopReason.context_full


class FormatErrors(End):
    stop = StopReason.format_errors
