"""`etude start`: a run on a platform whose services run already, wherever that is."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rich.console import Console

from etude.demo import DemoOptions, prepare
from etude.demo.prepare import DemoError
from shared import bus as buses
from shared import objects as stores
from shared.contracts import topics
from shared.contracts.messages import RunControl
from shared.settings import ServiceSettings, Told


async def announce(options: DemoOptions, settings: ServiceSettings) -> str:
    """Uploads what the run starts with, publishes `start`, and returns the run's id. Raises DemoError."""
    if options.pack and not options.problems and not (options.pack / "manifest.json").exists():
        await asyncio.to_thread(prepare.make_pack, options.pack)
    objects = await asyncio.to_thread(stores.connect, settings.objects_url)
    config, ref = await asyncio.to_thread(prepare.new_run, objects, replace(options, state=settings.state))
    bus = buses.connect(settings.bus_url, client="etude-start")
    try:
        start = RunControl(run=config.run, action="start", config=ref, by="etude start")
        await bus.publish(topics.RUNS_CONTROL, config.run, start)
    finally:
        await bus.close()
    return config.run


def run(options: DemoOptions) -> int:
    """Returns the exit code: 0 started, 1 something stands in the way."""
    console = Console()
    try:
        name = asyncio.run(announce(options, ServiceSettings()))
    except (DemoError, Told, ValueError) as error:
        console.print(str(error), style="red", highlight=False)
        return 1
    console.print(f"Run {name} is started.", highlight=False)
    return 0
