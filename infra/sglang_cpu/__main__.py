"""`python -m infra.sglang_cpu`"""

import argparse
import sys

from infra import sglang_cpu
from infra.sglang_cpu import CannotInstall, install

if __name__ == "__main__":
    about = (sglang_cpu.__doc__ or "").split("\n")[0]
    argparse.ArgumentParser(prog="python -m infra.sglang_cpu", description=about).parse_args()
    try:
        print(install())
    except CannotInstall as error:
        sys.exit(str(error))
