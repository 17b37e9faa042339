"""What the demo may be asked for. One field per option of `etude demo`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from etude.doctor import BASE_PORT
from shared.contracts.run import Retry


@dataclass(frozen=True, slots=True)
class DemoOptions:
    seed: int = 1
    minutes: float = 10.0  # first request to last publication
    problems: Path | None = None  # own problems instead of a pack
    pack: Path | None = None  # made before, instead of the cached one
    report: Path = Path("report.json")
    state: Path = Path(".etude")
    resume: bool = False
    eval_problems: int = 400  # 0: all held-out problems
    eval_samples: int = 8
    control: str = "none"
    staleness: int = 2
    router_replay: bool = True
    length_penalty: bool = True
    uniform_sampling: bool = False
    credit: Literal["turn", "attempt"] = "turn"
    retry: Retry = "fresh"
    chat: bool = (
        False  # the base speaks a chat format: limits and learning rates of a pretrained model, not of the shipped one
    )
    steps: int = 0
    groups_per_step: int = 16
    group_size: int = 8
    config: Path | None = None  # changes to the run's configuration (etude/demo/changes.py)
    base: str = ""  # an imported checkpoint to start from; "": the base policy that is part of the package
    probe: Path | None = None  # of the practice problems, as `etude tasks probe` writes it
    base_port: int = BASE_PORT  # ports of the services count from here; 0: free ones
