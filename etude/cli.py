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
    "tasks": "Make, import and look at problems.",
    "ledger": "Audit and show what became of every attempt.",
    "trace": "Print the whole life of one attempt, with times.",
    "inference": "Check an engine's weights; print SGLang's command line.",
    "weights": "Verify that engines, manifests and trainer agree bit for bit.",
    "access": "A user and an object key of its own for every service.",
    "base": "Make the base policy: pretraining, SFT, MTP.",
}
# `etude --help`, in this order; a command that none names comes last, without a panel.
PANELS = {
    "Begin": ("demo", "doctor", "up", "down", "start", "status", "logs"),
    "A run": ("runs", "pause", "resume", "stop", "rollback", "reconfigure"),
    "How good it is": ("measure", "eval", "figures", "promote"),
    "In and out": ("tasks", "import", "export"),
    "For operators": ("plan", "ledger", "trace", "topics", "dlq", "access", "weights", "inference", "base"),
}
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}


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
        there = {*super().list_commands(ctx), *_registered()}
        return [*(name for name in PANEL_OF if name in there), *sorted(there - PANEL_OF.keys())]

    def get_command(self, ctx: Any, name: str) -> Any:
        command: Any = super().get_command(ctx, name)
        if command is None and (point := _registered().get(name)):
            command = _Deferred(point)
        if command is not None:
            command.rich_help_panel = PANEL_OF.get(name)
        return command


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
