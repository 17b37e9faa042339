"""A bare process instead of a sandbox, for code that you trust: the same harness with time and memory limits, nothing else.

Chosen only explicitly (ETUDE_SANDBOX=process). Candidate code can read your files, use your network and outlive its run.
"""

from __future__ import annotations

import functools
import shutil
import socket
import subprocess
import tempfile
import threading
from pathlib import Path

from shared.problems import values
from shared.sandbox import SandboxUnavailable, inside, meter
from shared.sandbox.bubblewrap import ENVIRONMENT, PYTHON_FLAGS, interpreter, require_linux
from shared.sandbox.inside import nursery
from shared.sandbox.slot import START_S, Nursery

_making = threading.Lock()


@functools.cache
def _tree() -> tempfile.TemporaryDirectory[str]:
    """The harness alone, as it lies in a sandbox; lives as long as this process."""
    tree = tempfile.TemporaryDirectory(prefix="etude-harness-")
    root = Path(tree.name) / "shared"
    shutil.copytree(
        Path(inside.__file__).parent, root / "sandbox" / "inside", ignore=shutil.ignore_patterns("__pycache__")
    )
    (root / "problems").mkdir()
    shutil.copy(values.__file__, root / "problems" / "values.py")
    return tree


def _harness() -> str:
    """Several threads may start at once: each would make a tree, and all but the last remembered are collected and gone."""
    with _making:
        return _tree().name


def start() -> Nursery:
    require_linux()
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    log = tempfile.TemporaryFile()  # noqa: SIM115 closed by Nursery.kill
    process = subprocess.Popen(
        [str(interpreter()), *PYTHON_FLAGS, "-m", nursery.__name__, "process", str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=log,
        pass_fds=(theirs.fileno(),),
        env={**ENVIRONMENT, "PYTHONPATH": _harness()},
        start_new_session=True,
    )
    theirs.close()
    started = Nursery(process, control, log)
    control.settimeout(START_S)
    try:
        started.expect(b"ready")
        started.meter = meter.of(process.pid)
    except (OSError, ValueError) as error:
        reason = started.last_words()
        started.kill()
        raise SandboxUnavailable(f"the process runner did not start: {reason or error!r}") from None
    return started
