"""Files that commands write for people: whether they can be is known before the work, and they appear whole."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.settings import Told


class NotWritable(Told, ValueError):
    """The text names the file, what stands in the way and what to do."""


def require_writable(path: Path, option: str) -> None:
    """Asked before the work whose outcome `path` shall hold. Raises NotWritable."""
    if path.is_dir():
        raise NotWritable(f"{option} {path}: is a folder; give a file")
    if not path.parent.is_dir():
        raise NotWritable(f"{option} {path}: there is no folder {path.parent}; make it, or give a file elsewhere")
    try:
        if _special(path):
            if not os.access(path, os.W_OK):  # opened, a pipe's reader would see its end
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        else:
            tempfile.TemporaryFile(dir=path.resolve().parent).close()
    except OSError as error:
        raise NotWritable(f"{option} {path}: cannot be written: {error.strerror}; give a file elsewhere") from None


def require_folder(folder: Path, option: str) -> None:
    """Check, before the work, that it can make or replace `folder`. Makes nothing. Raises NotWritable."""
    there = Path(os.path.abspath(folder)).parent
    while not os.path.lexists(there):
        there = there.parent
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        why = f"cannot be written: {there}: {error.strerror}"
        raise NotWritable(f"{option} {folder}: {why}; give a folder elsewhere") from None


def write_whole(path: Path, text: str) -> None:
    """Whoever reads sees what was there before or all of `text`. A link stays one. Raises NotWritable."""
    place = path.resolve()
    unfinished = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        if _special(path):
            path.write_text(text)
            return
        try:
            unfinished.write_text(text)
            unfinished.replace(place)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise NotWritable(f"{path}: cannot be written: {error.strerror}") from None


def _special(path: Path) -> bool:
    """A pipe or a device, /dev/stdout for one: nothing can take its place."""
    return path.exists() and not path.is_file()


def with_rows(head: Mapping[str, Any], name: str, rows: Mapping[str, Any]) -> str:
    """Return a JSON object with the fields of `head`, one or more, and the field `name`: an object with a line for each row."""
    each = ",\n".join(f"    {json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items())
    return f'{json.dumps(head, indent=2)[:-2]},\n  "{name}": {{\n{each}\n  }}\n}}\n'
