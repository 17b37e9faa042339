"""Code to pretrain the base policy on, beside that of the project's own environment (docs/base.md).

The distributions of shared/problems/corpus.txt, without what they depend on: they are read, never imported. The
directory appears whole or not at all; a second call returns at once.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from infra import setup

PINS = setup.ROOT / "shared" / "problems" / "corpus.txt"
_STAMP = ".stamp"


def install(out: Path) -> None:
    stamp = hashlib.sha256(PINS.read_bytes() + f"{sys.version_info[:2]}".encode()).hexdigest()
    if (out / _STAMP).is_file() and (out / _STAMP).read_text() == stamp:
        return
    setup.say(f"fetching code to pretrain on into {out}")
    unfinished = out.with_name(f".{out.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    options = ["-q", "-p", sys.executable, "--no-deps", "--only-binary", ":all:", "--target", str(unfinished)]
    if subprocess.run([*setup.uv(), "pip", "install", *options, "-r", str(PINS)]).returncode:
        setup.fail("the corpus could not be installed; the lines above say why.")
    (unfinished / _STAMP).write_text(stamp)
    shutil.rmtree(out, ignore_errors=True)
    unfinished.replace(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m infra.corpus", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, help="the directory of it; made, or replaced as a whole")
    install(parser.parse_args().out)
