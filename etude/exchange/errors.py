"""The refusal of an import or an export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shared.settings import Told

if TYPE_CHECKING:
    from shared.model.fields import UnknownModel  # its package imports torch


class NotExchanged(Told, ValueError):
    """Nothing was written; the text says what was found, what is allowed and what to do."""


def located(source: Path, error: UnknownModel) -> NotExchanged:
    """Return the refusal with its place: the one that the error names, or `source`."""
    return NotExchanged(str(error) if error.path else f"{source}: {error}")
