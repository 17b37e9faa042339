"""What all servers share: where one lives, and what it must tell to be started, waited for and used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Place:
    """Where one server lives. `folder` is its own; `ports[0]` is the one that clients use; `secret` is its password."""

    folder: Path
    ports: tuple[int, ...]
    secret: str

    @property
    def port(self) -> int:
        return self.ports[0]

    @property
    def data(self) -> Path:
        return self.folder / "data"


@dataclass(frozen=True, slots=True)
class Launch:
    """A process to start. `variables` come over the environment's; `stop`: the signal that ends it cleanly."""

    arguments: list[str]
    variables: dict[str, str]
    stop: int


class Server(Protocol):
    name: str
    ports: int  # how many it needs

    def install(self) -> str:
        """Finds or gets the program; returns its version. Raises infra.servers.Unavailable."""

    def prepare(self, place: Place) -> None:
        """Configuration always, an empty data folder once. Called before every start."""

    def launch(self, place: Place) -> Launch: ...

    def ready(self, place: Place) -> bool:
        """One round trip as a client, in a second or two. False, or any exception of the client: not yet."""

    def settings(self, place: Place) -> dict[str, str]:
        """The `ETUDE_…` variables with which services use it."""
