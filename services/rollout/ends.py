"""How an attempt ends: typed exceptions, raised anywhere in the loop and turned into a StopReason in one place."""

from __future__ import annotations

from typing import ClassVar

from shared.contracts.messages import StopReason


class End(Exception):
    stop: ClassVar[StopReason]


class Submitted(End):
    stop = StopReason.submitted


class TurnLimit(End):
    """Also: a limit of the workspace's own, such as one edit more than allowed."""

    stop = StopReason.turn_limit


class ContextFull(End):
    """The token budget of the attempt or the context of the model is spent."""

    stop = StopReason.context_full


class FormatErrors(End):
    stop = StopReason.format_errors


class Deadline(End):
    """The attempt's own limit of seconds, or the scheduler's cancel."""

    stop = StopReason.deadline


ENDS: dict[StopReason, type[End]] = {
    end.stop: end for end in (Submitted, TurnLimit, ContextFull, FormatErrors, Deadline)
}
