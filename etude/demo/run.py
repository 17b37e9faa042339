"""The demo from beginning to end: prepare, measure, practise, measure again, report. Every phase is remembered in
`<state>/demo.json`, so that `--resume` goes on where an interrupted demo stood."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from etude.demo import prepare, report
from etude.demo.conduct import Conductor, Stalled
from etude.demo.options import DemoOptions
from etude.demo.prepare import DemoError
from etude.demo.watch import Evaluation, Practice, evaluation_end, say, watching
from etude.supervisor import AlreadyRunning, PortsTaken, ServiceSpec, Supervisor, default_specs, require_ports
from shared import bus as buses
from shared import objects as stores
from shared.contracts.run import Ref, RunConfig
from shared.settings import ServiceSettings, Told

EVALUATION_REPLICA = "inference-evaluation"
LOCAL = ("bus.db", "ledger.db", "jobs.db", "objects", "logs", "run", "demo.json")


def run(options: DemoOptions) -> int:
    """Returns the exit code: 0 done, 1 something stands in the way, 130 interrupted (resume with --resume)."""
    console = Console()
    try:
        if options.control == "sft":
            from etude.demo.control import run_control

            return asyncio.run(run_control(options, console))
        return asyncio.run(_Demo(options, console).run())
    except (DemoError, AlreadyRunning, PortsTaken, Stalled, Told) as error:
        console.print(str(error), style="red", highlight=False)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("Stopped. `etude demo --resume` goes on from here.")
        return 130


class _Demo:
    def __init__(self, options: DemoOptions, console: Console) -> None:
        self.console = console
        self.state = options.state.resolve()
        self.options = options
        self.memory: dict[str, Any] = {}

    # What is remembered between interruptions

    def _remember(self, **facts: Any) -> None:
        self.memory.update(facts)
        temporary = self.state / "demo.json.tmp"
        temporary.write_text(json.dumps(self.memory, default=str, indent=1))
        temporary.replace(self.state / "demo.json")

    def _recall(self) -> None:
        try:
            self.memory = json.loads((self.state / "demo.json").read_text())
        except FileNotFoundError:
            raise DemoError(f"{self.state}: no demo to resume here; start one with `etude demo`") from None
        known = {**self.memory["options"]}
        for field in ("problems", "pack", "report", "state", "config"):
            known[field] = Path(known[field]) if known.get(field) else None
        # Where it runs is this call's business, what it does the first one's.
        self.options = DemoOptions(**{**known, "resume": True, "base_port": self.options.base_port})

    def _set_aside(self) -> None:
        """An earlier demo's state moves to `<state>/archive/<time>`; any other platform's state is not touched."""
        there = [name for name in LOCAL if (self.state / name).exists()]
        if not there:
            return
        if "demo.json" not in there:
            raise DemoError(
                f"{self.state} holds the state of a platform that is no demo; give another folder with --state"
            )
        target = self.state / "archive" / f"{datetime.now(UTC):%Y%m%dT%H%M%S}"
        target.mkdir(parents=True)
        for path in [p for name in LOCAL for p in self.state.glob(f"{name}*")]:
            shutil.move(path, target / path.name)

    # The demo

    async def run(self) -> int:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        with Supervisor(
            self.state, say=lambda text: self.console.print(text, style="yellow", highlight=False)
        ) as supervisor:
            if self.options.resume:
                self._recall()
            specs = default_specs(self.options.base_port)
            require_ports(specs, "give other ones with --base-port (0: free ones)")
            if not self.options.resume:
                self._set_aside()
            settings = ServiceSettings(state=self.state)  # the same adapters as the services'
            objects = stores.connect(settings.objects_url)
            if not self.options.resume:
                await asyncio.to_thread(self._begin, objects)
            config = self._config(objects)
            bus = buses.connect(settings.bus_url, client="etude-demo")
            supervisor.start(specs)
            page = next((f"; the page: http://127.0.0.1:{s.port}" for s in specs if s.name == "console" and s.port), "")
            self.console.print(f"Run {config.run}. `etude status` shows the services{page}", highlight=False)
            try:
                async with Conductor(bus, objects, config.run) as conductor:
                    return await self._conduct(conductor, supervisor, config, objects)
            finally:
                await bus.close()

    def _begin(self, objects: stores.Objects) -> None:
        options, started = self.options, time.time()
        config, ref = prepare.new_run(objects, replace(options, state=self.state))
        self._remember(
            run=config.run,
            config=msgspec.to_builtins(ref),
            options=asdict(options),
            phase="before",
            prepared_s=time.time() - started,
        )

    def _config(self, objects: stores.Objects) -> RunConfig:
        return msgspec.json.decode(objects.get(msgspec.convert(self.memory["config"], Ref)), type=RunConfig)

    async def _conduct(
        self, conductor: Conductor, supervisor: Supervisor, config: RunConfig, objects: stores.Objects
    ) -> int:
        options, ref = self.options, msgspec.convert(self.memory["config"], Ref)
        if self.memory["phase"] == "before":
            if not self.memory.get("announced"):
                await conductor.control("start", "pause", config=ref)
                self._remember(announced=True)
            await conductor.served(0)
            before = await self._evaluate(conductor, supervisor, config, "before", 0)
            self._remember(phase="practice", before=before)
        if self.memory["phase"] == "practice":
            await conductor.control("resume", config=ref)
            try:
                practice = Practice(conductor.progress)
                async with watching(self.console, "practice", options.minutes * 60, practice):
                    await conductor.finished()
                say(self.console, "practice", practice.end())
            except asyncio.CancelledError:
                await conductor.control("pause")  # the clock of practice stops while the demo is interrupted
                raise
            self._remember(phase="after")
        if self.memory["phase"] == "after":
            serial = conductor.progress.newest_serial
            await conductor.served(serial)
            after = await self._evaluate(conductor, supervisor, config, "after", serial)
            self._remember(phase="report", after=after, serial=serial)
        audit = await asyncio.to_thread(report.audit, self.state, config.run)
        outcome = report.Outcome(
            options=options,
            config=config,
            before=self.memory["before"],
            after=self.memory["after"],
            progress=conductor.progress,
            audit=audit,
            prepared_s=float(self.memory.get("prepared_s", 0.0)),
        )
        report.write(outcome, options.report, objects, self.console)
        self._remember(phase="done")
        return 0 if outcome.sound else 1

    async def _evaluate(
        self, conductor: Conductor, supervisor: Supervisor, config: RunConfig, name: str, serial: int
    ) -> dict[str, Any]:
        """While nothing trains, the trainer's core is free: a second engine samples beside the first."""
        from etude.evaluate import count_objects

        assert config.eval_pack
        there = await asyncio.to_thread(count_objects, conductor.objects, config.eval_pack)
        total = (self.options.eval_samples + 1) * min(self.options.eval_problems or there, there)
        supervisor.start(
            [
                ServiceSpec(
                    EVALUATION_REPLICA, "services.inference", {"ETUDE_POOL": "evaluation", "ETUDE_PINNED": str(serial)}
                )
            ]
        )
        started, title = time.time(), f"held-out, {name}"
        async with watching(self.console, title, total, Evaluation(conductor.progress, serial, total)):
            result = await conductor.evaluate(
                name, serial, config, problems=self.options.eval_problems, samples=self.options.eval_samples
            )
        await asyncio.to_thread(supervisor.stop_service, EVALUATION_REPLICA)
        result["seconds"] = time.time() - started
        say(self.console, title, evaluation_end(result, result["seconds"]))
        return result
