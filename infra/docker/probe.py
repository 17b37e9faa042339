"""Is the service in this container well? Exit code 0 or 1. Standard library only; nothing else is in every image.

`alive`: it answers `/healthz`. `once-ready`: it has answered `/readyz` with 200 once since the container started, and
answers `/healthz` now. Being not ready later on is work that waits on others, which restarting does not mend.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

MODES = ("alive", "once-ready")
WITHIN_S = 8.0
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy knows no address of this container


def ask(path: str, port: int) -> str:
    """Empty if the answer was 200, else what it was."""
    try:
        with OPENER.open(f"http://127.0.0.1:{port}{path}", timeout=WITHIN_S):
            return ""
    except urllib.error.HTTPError as error:
        return f"{path}: {error.code} {error.read(400).decode(errors='replace')}"
    except OSError as error:
        return f"{path}: {error}"


def main(mode: str, port: int, marker: Path) -> int:
    trouble = ask("/healthz", port)
    if not trouble and mode == "once-ready" and not marker.exists():
        trouble = ask("/readyz", port)
        if not trouble:
            marker.touch()
    if trouble:
        print(trouble)
    return 1 if trouble else 0


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in MODES:
        sys.exit(f"found {sys.argv[1:]}; allowed: {' or '.join(MODES)}")
    # /tmp is the container's memory: a restart without the old answer starts without the mark.
    sys.exit(main(sys.argv[1], int(os.environ.get("ETUDE_PORT", "8700")), Path("/tmp/etude-was-ready")))
