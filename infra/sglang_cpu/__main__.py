"""`python -m infra.sglang_cpu`"""

import sys

from infra.sglang_cpu import CannotInstall, install

if __name__ == "__main__":
    try:
        print(install())
    except CannotInstall as error:
        sys.exit(str(error))
