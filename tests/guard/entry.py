"""The only places where the guard builds parts of the services. A restructuring changes the lines here and no others."""

from __future__ import annotations

import asyncio

from services.reward.grade import Grader
from services.reward.jobs import Answer, Job
from services.rollout.config import RolloutSettings
from services.rollout.service import serve
from shared import sandbox
from shared.bus import Bus
from shared.environments import Places
from shared.environments.registry import Environments
from shared.objects import Objects
from shared.sandbox.pool import FunctionPool
from shared.telemetry import Health

WORKERS = 2  # sandboxes at a time


def sandboxes() -> FunctionPool:
    """The real ones. Both services get them; close them with `close_sync`."""
    return sandbox.connect("bubblewrap", WORKERS)


async def rollout_service(
    config: RolloutSettings, bus: Bus, objects: Objects, functions: FunctionPool, health: Health, stop: asyncio.Event
) -> None:
    """Run the rollout service until `stop` is set."""
    await serve(config, bus, objects, Places(functions=functions, objects=objects), health, stop)


def grade(objects: Objects, functions: FunctionPool, name: str, job: Job) -> Answer:
    """Grade one job."""
    return Grader(objects, Environments(Places(functions=functions, objects=objects)), name).work(job)
