"""The services' log files stay small. A service runs for weeks, and writes on at the end of the file that it was given."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

LOG_BYTES = 16 << 20  # a log that is larger becomes LOG.1, in place of the one before


def set_aside(log: Path) -> None:
    """Of a service that does not run. Needs no room."""
    if _is_large(log):
        log.replace(_kept(log))


def begin_anew(log: Path) -> None:
    """Of one that runs, and appends: what is in the file is copied away. What is written in between is lost; where it cannot be
    copied, nothing is, and OSError is raised."""
    if not _is_large(log):
        return
    copy = log.with_suffix(".log.tmp")
    try:
        shutil.copyfile(log, copy)
        copy.replace(_kept(log))
        os.truncate(log, 0)
    finally:
        copy.unlink(missing_ok=True)


def _is_large(log: Path) -> bool:
    return log.exists() and log.stat().st_size > LOG_BYTES


def _kept(log: Path) -> Path:
    return log.with_suffix(".log.1")
