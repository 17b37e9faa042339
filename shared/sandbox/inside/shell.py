"""The text that makes a living shell run one script, and the part of its output that is kept.

The shell is an interactive one: it survives SIGINT, an unset variable, a failed expansion. It reads lines from its standard
input. Descriptors 7 and 8 are the session's standard output and error, 9 tells the loop that a script has ended. A script sees
none of them under these numbers. A script can still find and write to 9: the exit code is a claim of the code inside.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

OUT, ERR, TELL = 7, 8, 9
BASH = ("/bin/bash", "--noediting", "--noprofile", "--norc", "-i", "+m", "+H")
SH = ("/bin/sh", "-i")
QUIET = b"set +o history 2>/dev/null; unset HISTFILE; PS1= PS2=\n"  # bash's alone; fails silently elsewhere
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
# Variables that a shell reads at its start alone, or that it does not take from its environment.
_AT_START = re.compile(r"(BASH|PS\d|SHELL|_\Z|(E?UID|PPID|IFS|ENV|OLDPWD|PWD|POSIXLY_CORRECT|HISTFILE)\Z)")
_CODE = re.compile(rb" (\d{1,3})\n")


def quoted(text: str) -> str:
    """Return a word that any shell reads as the text."""
    return "'" + text.replace("'", "'\\''") + "'"


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> bytes | None:
    """Return the input that gives a running shell another environment; None: only a new shell can have it."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if any(not NAME.match(name) or _AT_START.match(name) or "\0" in after.get(name, "") for name in names):
        return None
    text = [f"export {name}={quoted(after[name])}\n" if name in after else f"unset {name}\n" for name in names]
    return "".join(text).encode("utf-8", "surrogateescape")


def lines(script: str, mark: str, stdin: str, env: Mapping[str, str], cwd: str | None) -> bytes:
    """Return the input that runs a script and then tells the mark with its exit code. `stdin`: path of a file. Raises ValueError
    for what a shell cannot hold."""
    for name, value in env.items():
        if not NAME.match(name) or "\0" in value:
            raise ValueError(f"env: found {name!r:.80}; allowed: a name of letters, digits and _, a value without NUL")
    if "\0" in script or "\0" in (cwd or ""):
        raise ValueError("script: found a NUL byte; a shell cannot hold one")
    words = [f"{name}={quoted(value)}" for name, value in env.items()]
    run = " ".join([*words, "command eval", quoted(script)])
    redirected = f"{run} <{quoted(stdin)} >&{OUT} 2>&{ERR} {OUT}>&- {ERR}>&- {TELL}>&-"
    back = ""
    if cwd is not None:
        redirected = f"etude_back=$PWD; command cd -- {quoted(cwd)} >/dev/null 2>&{ERR} && {redirected}"
        back = 'command cd -- "$etude_back" >/dev/null 2>&1; unset etude_back; '
    told = f"etude_code=$?; {back}PS1= PS2=; command printf '%s %s\\n' {mark} \"$etude_code\" >&{TELL}"
    return f"{redirected}\n{told}\n".encode("utf-8", "surrogateescape")


def code_after(mark: str, told: bytes) -> int | None:
    """Return the exit code that stands behind the mark; None: the mark is not there yet."""
    found = _CODE.match(told.partition(mark.encode())[2])  # a pattern with the mark would be compiled for every script
    return int(found[1]) if found else None


# An interactive shell without a terminal says these on its standard error.
_NOISE = re.compile(rb"^(bash: \[\d+: \d+ \(\d+\)\] tcsetattr: [^\n]*|\[\d+\] \d+)\n", re.MULTILINE)


def without_noise(errors: bytes, *, ended: bool) -> bytes:
    """Return the errors without the shell's remarks on jobs and its terminal. `ended`: the shell has
    ended, and may have said so."""
    errors = _NOISE.sub(b"", errors)
    return errors[: -len(b"exit\n")] if ended and errors.endswith(b"exit\n") else errors


class Kept:
    """The first and the last bytes of an output of any length. `most`: how many are kept."""

    def __init__(self, most: int) -> None:
        self._head, self._tail, self.lost = bytearray(), bytearray(), 0
        self._half = most // 2

    def add(self, data: bytes) -> None:
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if (over := len(self._tail) - self._half) > 0:
            self.lost += over
            del self._tail[:over]

    def whole(self) -> bytes:
        between = b"\n[%d bytes left out]\n" % self.lost if self.lost else b""
        return bytes(self._head) + between + bytes(self._tail)
