"""What runs.control says about a run, as the trainer obeys it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.trainer.rollback import Wanted
from shared.contracts.messages import RunControl
from shared.contracts.run import Ref


@dataclass(slots=True)
class RunState:
    """What runs.control says about a run."""

    config: Ref | None = None
    state: str = "running"  # running | paused (what is complete is trained) | held (nothing is) | stopping | finished
    rollbacks: list[Wanted] = field(default_factory=list)

    def apply(self, message: RunControl) -> None:
        """A run that is over is paused or stopped by nobody: to open it again would claim an incarnation of it."""
        match message.action:
            case "start" | "resume":
                self.state = "running"
            case "pause" if self.state in ("running", "paused", "held"):
                self.state = "paused" if message.drain else "held"
            case "stop" if self.state != "finished":
                self.state = "stopping"
            case "finished":
                self.state = "finished"
            case "rollback" if (
                self.state != "finished" and (wanted := Wanted.of(message)) and wanted not in self.rollbacks
            ):
                self.rollbacks.append(wanted)
        if message.config is not None and self.config is None:
            self.config = message.config  # what trains is fixed for the run; `reconfigure` is the scheduler's
