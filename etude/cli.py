"""The `etude` command line.

Commands of the front door live here; those of a service are registered under the entry-point group `etude.commands`
(`name = "services.<room>.cli:app"`), those below `etude plan` under `etude.plans`. They are imported only when they are called, so
that `etude --help` is quick and the front door imports no inside of a service.
"""

from __future__ import annotations

import sys
from typing import Any

import typer

from etude import deferred

# What a service's commands are for, so that `--help` need not import them.
SERVICE_HELP = {
    "tasks": "Make, import, probe and look at problems.",
    "rollout": "Make one attempt by hand, and read attempts.",
    "problem": "Why a problem was or was not drawn; how right the estimates are.",
    "ledger": "Audit and show what became of every attempt.",
    "trace": "Print the whole life of one attempt, with times.",
    "inference": "Check an engine's weights; print SGLang's command line.",
    "weights": "Verify that engines, manifests and trainer agree bit for bit.",
    "train": "Train a checkpoint on data: pretraining, SFT, MTP.",
    "data": "Make token files of a corpus.",
    "access": "A user and an object key of its own for every service.",
    "base": "Make the base policy: pretraining, SFT, MTP.",
    "reward": "Draw the length penalty; show a policy's habits.",
    "rescore": "Score recorded attempts under another reward.",
    "regrade": "Grade recorded submissions again, without sampling.",
    "sandbox": "Make root file systems for the sandboxes of agents.",
}
# Commands that stand below a service's, and need the services of a whole platform.
BELOW = {"tasks": {"probe": "etude.probing:app"}}
# `etude --help`, in this order; a command that none names comes last, without a panel.
PANELS = {
    "Begin": ("demo", "doctor", "up", "down", "start", "status", "logs"),
    "A run": ("runs", "pause", "resume", "stop", "rollback", "reconfigure"),
    "How good it is": (
        "measure",
        "eval",
        "compare",
        "study",
        "problem",
        "rollout",
        "figures",
        "reward",
        "rescore",
        "regrade",
        "promote",
    ),
    "In and out": ("tasks", "data", "train", "import", "export"),
    "For operators": ("plan", "ledger", "trace", "topics", "dlq", "access", "weights", "inference", "base", "sandbox"),
}
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}


class _Commands(deferred.group("etude.commands", SERVICE_HELP, BELOW)):  # type: ignore[misc]
    """All commands, in the order of the panels."""

    def list_commands(self, ctx: Any) -> list[str]:
        there = set(super().list_commands(ctx))
        return [*(name for name in PANEL_OF if name in there), *sorted(there - PANEL_OF.keys())]

    def get_command(self, ctx: Any, name: str) -> Any:
        command: Any = super().get_command(ctx, name)
        if command is not None:
            command.rich_help_panel = PANEL_OF.get(name)
        return command


app = typer.Typer(
    cls=_Commands,
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
