"""The services' log files stay small. A service runs for weeks, and writes on at the end of the file that it was given."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

LOG_BYTES = 16 << 20  # a log that is larger becomes LOG.1, in place of the one before

TAIL_BYTES = 8192  # a line of JSON with a long reason fits
WORDS_CHARS = 500


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


def last_words(log: Path) -> str:
    """Return the last line that a service wrote. Of a JSON line of ours, return the reason alone; without a line, an empty text."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    line = next((line.strip() for line in reversed(lines) if line.strip()), "")
    try:
        told = json.loads(line)
    except ValueError:
        told = None
    if isinstance(told, dict):
        line = str(told.get("reason") or told.get("error") or told.get("event") or line)
    return line[:WORDS_CHARS]


def _is_large(log: Path) -> bool:
    return log.exists() and log.stat().st_size > LOG_BYTES


def _kept(log: Path) -> Path:
    return log.with_suffix(".log.1")
