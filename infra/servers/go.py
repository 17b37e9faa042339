"""Where Go is: MinIO is built from its module, and Grafana's schema is one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from infra.servers import Unavailable

GO = (1, 24)  # what MinIO's module asks for


def find_go(what_for: str) -> Path:
    """A Go that is new enough: on PATH, where its makers install it, or where Debian's (backports) packages do. Raises
    Unavailable."""
    candidates = [Path(found)] if (found := shutil.which("go")) else []
    candidates += [Path("/usr/local/go/bin/go"), *sorted(Path("/usr/lib").glob("go-*/bin/go"), reverse=True)]
    seen = []
    for path in candidates:
        if not os.access(path, os.X_OK):
            continue
        text = subprocess.run([str(path), "version"], capture_output=True, text=True, cwd="/").stdout
        version = re.search(r"go(\d+)\.(\d+)", text)
        if version and (int(version[1]), int(version[2])) >= GO:
            return path
        seen.append(f"{path} {version[0] if version else 'without a version'}")
    raise Unavailable(
        f"{what_for}: needs Go {GO[0]}.{GO[1]} or newer to be built; found: {', '.join(seen) or 'none'}. Way out: Debian's "
        "golang-go from the release's backports, or an archive from go.dev unpacked to /usr/local/go"
    )
