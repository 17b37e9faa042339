"""The `etude` command line.

Commands of the front door live here; those of a service are registered under the entry-point group `etude.commands`
(`name = "services.<room>.cli:app"`) and are imported only when they are called, so that `etude --help` is quick and the
front door imports no inside of a service.
"""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

# What a service's commands are for, so that `--help` need not import them.
SERVICE_HELP = {
    "tasks": "Make, import and look at problems (curator).",
    "ledger": "Audit and show what became of every attempt (scheduler).",
    "trace": "Print the whole life of one attempt, with times (scheduler).",
    "inference": "Checksums and state of the engines (inference).",
    "weights": "Verify that engines, manifests and trainer agree bit for bit (trainer).",
    "access": "A user and an object key of its own for every service.",
    "base": "Make the base policy: pretraining, SFT, MTP (trainer).",
}


def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group="etude.commands")}


class _Deferred(TyperGroup):
    """Stands for a service's commands in the list; the service is imported when one of them is called."""

    def __init__(self, point: EntryPoint) -> None:
        super().__init__(name=point.name, help=SERVICE_HELP.get(point.name, ""))
        self._point = point

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        command = get_command(self._point.load())
        command.name = self._point.name
        return command.make_context(info_name, args, parent=parent, **extra)


class _Lazy(TyperGroup):
    """A group whose service commands are imported on use."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted({*super().list_commands(ctx), *_registered()})

    def get_command(self, ctx: Any, name: str) -> Any:
        known = super().get_command(ctx, name)
        if known is not None:
            return known
        point = _registered().get(name)
        return None if point is None else _Deferred(point)


app = typer.Typer(
    cls=_Lazy,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Étude trains coding agents by asynchronous reinforcement learning.\n\nStart here: `etude demo`.",
)


def _front_door() -> None:
    from etude import commands

    commands.register(app)


def main() -> None:
    _front_door()
    try:
        app()
    except Exception as error:  # any command may be the first to look at its settings
        from shared.settings import REFUSED, BadSettings

        if not isinstance(error, BadSettings):
            raise
        print(error, file=sys.stderr)
        raise SystemExit(REFUSED) from None


if __name__ == "__main__":
    main()
