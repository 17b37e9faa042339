"""Formats of other data sets, recognised where a file of problems is expected: to name them and the command that reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Source of `etude tasks import` -> what people call the format, and fields that only its rows have together.
_ROWS: dict[str, tuple[str, frozenset[str]]] = {
    "swe-bench": ("SWE-bench, SWE-Gym or their like", frozenset({"instance_id", "base_commit", "test_patch"})),
    "r2e-gym": ("R2E-Gym", frozenset({"parsed_commit_content", "execution_result_content"})),
    "swe-smith": ("SWE-smith", frozenset({"instance_id", "repo", "patch", "FAIL_TO_PASS"})),
}
PARQUET = b"PAR1"


def rows(path: Path, text: str) -> str | None:
    """Return what to say of a text that begins with a row of another data set, or None. `text`: JSON lines or an array."""
    row = _first(text)
    for source, (name, fields) in _ROWS.items():
        if isinstance(row, dict) and fields <= row.keys():
            return _say(path, f"rows of {name}", f"{source} {path} --repos FOLDER_OF_CLONES")
    return None


def folder(path: Path) -> str | None:
    """Return what to say of a folder of Harbor tasks, or of one task; None: it is none."""
    if (path / "task.toml").is_file() or next(path.glob("*/task.toml"), None) is not None:
        return _say(path, "Harbor tasks", f"harbor {path}")
    return None


def parquet(path: Path) -> str:
    """Return what to say of a Parquet file, as which many data sets are published."""
    return (
        f'{path}: found a Parquet file; `pandas.read_parquet(FILE).to_json(OUT, orient="records", lines=True)` makes JSON lines. '
        f"Rows of {', '.join(_ROWS)} then go through `etude tasks import SOURCE OUT --repos FOLDER_OF_CLONES --out PACK`"
    )


def _say(path: Path, found: str, arguments: str) -> str:
    return (
        f"{path}: found {found}; allowed here: problems of this project's format. `etude tasks import {arguments} --out PACK` "
        'makes a pack of them, for --pack PACK (docs/problems.md, "From other data sets")'
    )


def _first(text: str) -> Any:
    """Return the first JSON object of a text, or None where that cannot be read. Some data sets nest the row in `instance`."""
    text = text.lstrip().removeprefix("[").lstrip()
    try:
        row, _ = json.JSONDecoder(parse_int=str).raw_decode(text)
    except (ValueError, RecursionError):
        return None
    inner = row.get("instance") if isinstance(row, dict) else None
    return inner if isinstance(inner, dict) else row
