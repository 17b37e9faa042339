"""What options of several commands are held to."""

from __future__ import annotations

import math

import typer


def finite(value: float | None) -> float | None:
    """For `typer.Option(callback=finite)`: inf is a number of seconds or of points that nobody means."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"found {value}; allowed: a finite number")
    return value
