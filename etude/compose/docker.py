"""The `docker` program, asked. It decides which engine answers: DOCKER_HOST and contexts count as they do for a person."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

WITHIN_S = 60.0  # an engine on a busy machine; one that hangs must not hang the doctor


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def reason(self) -> str:
        """The last line that it said about a failure."""
        return last_line(self.err) or last_line(self.out) or f"exit code {self.code}"


def there() -> bool:
    return shutil.which("docker") is not None


def ask(folder: Path, *arguments: str) -> Answer:
    """What `docker …` says, called in `folder`."""
    try:
        done = subprocess.run(
            ["docker", *arguments], cwd=folder, capture_output=True, text=True, errors="replace", timeout=WITHIN_S
        )
    except subprocess.TimeoutExpired:
        return Answer(124, "", f"docker {arguments[0]}: no answer within {WITHIN_S:.0f} s")
    return Answer(done.returncode, done.stdout, done.stderr)


def last_line(text: str, longest: int = 300) -> str:
    """The last one that is not empty, without what would steer a terminal. A log is what anybody wrote."""
    lines = [line for line in (plain(line) for line in text.splitlines()) if line]
    return lines[-1][:longest] if lines else ""


def plain(line: str) -> str:
    return "".join(character if character.isprintable() else " " for character in line).strip()
