"""`python -m services --check`: would every service that is installed here take its settings? Exit code 2 and a line for each
that is wrong, else 0 and nothing. `python -m services.NAME --check` prints one's.

Reads the `config` of each service and nothing else of them: it is quick, and what one of them needs to run need not be here.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from shared.settings import REFUSED, BadSettings, ServiceSettings, Told, read


def settings_classes() -> list[type[ServiceSettings]]:
    """What `services/NAME/config.py` declare, in the order of the names."""
    found: list[type[ServiceSettings]] = []
    for path in sorted(Path(__file__).parent.glob("*/config.py")):
        module = importlib.import_module(f"services.{path.parent.name}.config")
        found += [
            item
            for item in vars(module).values()
            if isinstance(item, type) and issubclass(item, ServiceSettings) and item.__module__ == module.__name__
        ]
    return found


def wrong() -> list[str]:
    """What stands in the way, each once: most settings are every service's."""
    lines: dict[str, None] = {}
    for cls in settings_classes():
        try:
            read(cls)
        except BadSettings as error:
            lines |= dict.fromkeys(str(error).splitlines())
    return [*lines, *_lacking()]


def _lacking() -> list[str]:
    """Return a line for each package that a setting needs and that is not installed."""
    try:
        share = read(ServiceSettings).traces
        if share > 0:
            from shared.telemetry_spans import require_sdk

            require_sdk(share)
    except BadSettings:
        return []  # said already
    except Told as error:
        return [str(error)]
    return []


def main() -> None:
    if sys.argv[1:] in (["--help"], ["-h"]):
        print((__doc__ or "").strip())
        raise SystemExit(0)
    if sys.argv[1:] != ["--check"]:
        found = " ".join(sys.argv[1:]) or "nothing"
        print(f"found {found}; allowed: --check, --help (services start by themselves: services.NAME)", file=sys.stderr)
        raise SystemExit(REFUSED)
    lines = wrong()
    print("\n".join(lines), file=sys.stderr, end="\n" if lines else "")
    raise SystemExit(REFUSED if lines else 0)


if __name__ == "__main__":
    main()
