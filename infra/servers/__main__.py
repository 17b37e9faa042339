"""`python -m infra.servers up [NAME …] | down [--keep] | status | env | programs`"""

from __future__ import annotations

import argparse
import shlex
import sys
import time

from infra.servers import Unavailable, fleet, pgbouncer, programs, say, state
from infra.servers.postgres import Postgres


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m infra.servers", description="Real servers for the tests.")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start them; what runs is left alone")
    up.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(fleet.NAMES)}; none: all")
    down = commands.add_parser("down", help="stop them and remove their data")
    down.add_argument("--keep", action="store_true", help="leave data and addresses for the next start")
    commands.add_parser("status", help="what runs where; exit code 1 unless all do")
    commands.add_parser("env", help='variables for the services: eval "$(python -m infra.servers env)"')
    commands.add_parser("programs", help="fetch the programs that tests start besides the servers")
    arguments = parser.parse_args()
    if arguments.command == "up":
        if unknown := set(arguments.names) - set(fleet.NAMES):
            parser.error(f"no server {sorted(unknown)[0]!r}; allowed: {', '.join(fleet.NAMES)}")
        return _up(arguments.names or fleet.NAMES)
    if arguments.command == "down":
        fleet.down(keep=arguments.keep)
        return 0
    if arguments.command == "status":
        return _status()
    if arguments.command == "programs":
        return _programs()
    for name, value in state.settings().items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def _up(names: list[str]) -> int:
    began = time.monotonic()
    try:
        fleet.up(names)
    except Unavailable as error:
        print(f"servers: {error}", file=sys.stderr)
        return 1
    if Postgres.name in names:
        _also_pgbouncer()
    say(f"all there, {time.monotonic() - began:.1f} s")
    return 0


def _also_pgbouncer() -> None:
    """Fetch the program for the tests. If that fails, say so; the tests that need it then skip."""
    try:
        pgbouncer.install()
    except Unavailable as error:
        say(f"without PgBouncer, whose tests skip: {error}")


def _programs() -> int:
    try:
        programs.fetch()
    except Unavailable as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _status() -> int:
    rows = state.read()
    for name in fleet.NAMES:
        row = rows.get(name)
        process = row.process if row else None
        memory = f", {process.memory_info().rss >> 20} MiB" if process else ""
        print(f"{name:9}{f'port {row.ports[0]}, process {row.pid}{memory}' if row and process else 'not running'}")
    return 0 if all(name in rows and rows[name].process for name in fleet.NAMES) else 1


if __name__ == "__main__":
    raise SystemExit(main())
