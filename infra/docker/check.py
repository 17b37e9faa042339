"""What stands in the way of docker compose on this machine, and the way out of each. Exit code 1 if something does.

    python3 infra/docker/check.py

Standard library only, Python 3.9 or newer: it runs before anything is installed. `etude doctor --compose` says the same.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.dont_write_bytecode = True  # a checkout that root looked at stays the user's
sys.path.insert(0, str(ROOT))
# Python 3.6 must be able to parse this file. The modules that it imports may need a newer Python.
if sys.version_info < (3, 9):  # noqa: UP036
    sys.exit(
        f"check: found Python {sys.version.split()[0]}; needed: 3.9 or newer, such as python3.12 infra/docker/check.py"
    )

from etude.compose.checks import findings  # noqa: E402
from etude.finding import report  # noqa: E402

if __name__ == "__main__":
    argparse.ArgumentParser(prog="python3 infra/docker/check.py", description=__doc__.split("\n")[0]).parse_args()
    sys.exit(report(findings(ROOT), "docker compose has all it needs."))
