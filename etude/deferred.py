"""Groups of commands to which services add their own by entry points. A service is imported when its command is called."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from typer.core import TyperGroup
from typer.main import get_command


class _Deferred(TyperGroup):
    """Stands for a service's command, or group of commands, in the list. `below`: commands of the front door that the group of the
    service gets besides its own, name -> `module:app`."""

    def __init__(self, point: EntryPoint, about: str, below: Mapping[str, str]) -> None:
        super().__init__(name=point.name, help=about)
        self._point, self._below = point, below

    def loaded(self) -> Any:
        """Import and return the command that this one stands for."""
        command: Any = get_command(self._point.load())
        command.name = self._point.name
        for name, value in self._below.items():
            command.add_command(get_command(EntryPoint(name, value, "").load()), name)
        return command

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self.loaded().make_context(info_name, args, parent=parent, **extra)


def group(
    entry_point_group: str, about: Mapping[str, str], below: Mapping[str, Mapping[str, str]] | None = None
) -> type[TyperGroup]:
    """Return a class of groups with the commands of this entry-point group besides their own. `about`: what each is for, so that
    `--help` need not import them. `below`: for a service's group, commands of the front door that it gets besides its own, name ->
    `module:app`; None: none gets any."""

    class Deferring(TyperGroup):
        def points(self) -> dict[str, EntryPoint]:
            return {point.name: point for point in entry_points(group=entry_point_group)}

        def list_commands(self, ctx: Any) -> list[str]:
            own = super().list_commands(ctx)
            return [*own, *sorted(self.points().keys() - set(own))]

        def get_command(self, ctx: Any, name: str) -> Any:
            command: Any = super().get_command(ctx, name)
            if command is None and (point := self.points().get(name)):
                return _Deferred(point, about.get(name, ""), (below or {}).get(name, {}))
            return command

    return Deferring
