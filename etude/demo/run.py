"""The demo from beginning to end: prepare, measure, practise, measure again, report. Every phase is remembered in
`<state>/demo.json`, so that `--resume` goes on where an interrupted demo stood.

What fails or is stopped before the first phase is begun again by the same command: an earlier demo is set aside only when
what the user gave is checked and what takes minutes is made, and what a set-up left behind is set aside like a demo."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from etude.acting import in_folder
from etude.demo import prepare, report
from etude.demo.background import ended_by_signals, in_thread
from etude.demo.by_kind import kinds_of
from etude.demo.conduct import Conductor, Stalled, explained
from etude.demo.options import DemoOptions
from etude.demo.prepare import DemoError
from etude.demo.watch import Evaluation, Practice, evaluation_end, say, say_error, watching
from etude.supervisor import AlreadyRunning, PortsTaken, ServiceSpec, Supervisor, default_specs, require_ports
from shared import bus as buses
from shared import objects as stores
from shared.contracts.ids import new_run_id
from shared.contracts.run import Ref, RunConfig
from shared.settings import ServiceSettings, Told, read

EVALUATION_REPLICA = "inference-evaluation"
LOCAL = ("bus.db", "ledger.db", "jobs.db", "objects", "logs", "run", "demo.json")
SET_UP = "set-up"  # the phase before the first that can be resumed


def run(options: DemoOptions) -> int:
    """Returns the exit code: 0 done, 1 something stands in the way, 130 interrupted."""
    console = Console()
    demo = Demo(options, console)
    try:
        if options.control == "sft":
            from etude.demo.control import run_control

            return asyncio.run(run_control(options, console))
        return asyncio.run(demo.run())
    except (DemoError, AlreadyRunning, PortsTaken, Stalled, Told) as error:
        say_error(console, error)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        with contextlib.suppress(OSError):  # the terminal may be what ended it
            console.print(demo.stopped(), highlight=False, markup=False, soft_wrap=True)
        return 130


def ready(options: DemoOptions) -> DemoOptions:
    """The same options with a pack that is whole. What the user gave is checked, and what takes minutes is made and cached;
    nothing of a demo is written yet. Raises DemoError, Told."""
    step = prepare.planned(new_run_id(), options).schedule.groups_per_step
    if options.problems:
        pack = prepare.own_pack(options.problems, options.state / "own-pack", groups_per_step=step)
    else:
        pack = options.pack or prepare.make_pack()
        prepare.require_a_step(str(pack), prepare.problems_in(pack, "rl"), step)
        prepare.problems_in(pack, "held_out")
    if not options.uniform_sampling:
        prepare.surprises(pack)
    return replace(options, problems=None, pack=pack)


class Demo:
    """One call of `etude demo`, and the demo in its state directory."""

    def __init__(self, options: DemoOptions, console: Console) -> None:
        self.console = console
        self.state = options.state.resolve()
        self.options = options
        self.memory: dict[str, Any] = {}

    def _command(self, words: str) -> str:
        return f"`{in_folder(words, read(ServiceSettings, state=self.options.state))}`"

    # What is remembered between interruptions

    def _remember(self, **facts: Any) -> None:
        self.memory.update(facts)
        temporary = self.state / "demo.json.tmp"
        temporary.write_text(json.dumps(self.memory, default=str, indent=1))
        temporary.replace(self.state / "demo.json")

    def recall(self) -> None:
        """Takes up the demo that was interrupted, with the options it began with. Raises DemoError."""
        try:
            memory = json.loads((self.state / "demo.json").read_text())
        except FileNotFoundError:
            raise DemoError(
                f"{self.state}: no demo to resume here; start one with {self._command('etude demo')}"
            ) from None
        if memory["phase"] == SET_UP:
            raise DemoError(
                f"{self.state}: no demo to resume here, its set-up did not end; {self._command('etude demo')} begins again, "
                "what is cached is kept"
            )
        self.memory = memory
        known = {**self.memory["options"]}
        for field in ("problems", "pack", "report", "config"):
            known[field] = Path(known[field]) if known.get(field) else None
        if memory["phase"] == "done":
            raise DemoError(
                f"{self.state}: the demo here is at its end, its figures are in {known['report']}; {self._command('etude demo')} "
                "begins another, and keeps this one in archive/"
            )
        # Where it runs is this call's business, what it does the first one's.
        here = {"state": self.options.state, "base_port": self.options.base_port}
        self.options = DemoOptions(**{**known, **here, "resume": True})

    def stopped(self) -> str:
        """What a person reads who has stopped this demo: the way on."""
        if self.options.control != "none":
            return "Stopped. A control cannot be resumed; the same command begins again."
        if self.memory.get("phase", SET_UP) == SET_UP:
            return f"Stopped during set-up; {self._command('etude demo')} begins again, what is cached is kept."
        return f"Stopped. {self._command('etude demo --resume')} goes on from here."

    def stalled(self) -> str:
        """What a person can do when nothing has happened for long, and the services are stopped."""
        return (
            f"{self._command('etude logs NAME')} shows what a service said last; "
            f"{self._command('etude demo --resume')} tries again."
        )

    def _there(self) -> list[str]:
        """What lies in the state directory of a demo, begun or whole. Raises DemoError for another platform's."""
        there = [name for name in LOCAL if (self.state / name).exists()]
        if there and "demo.json" not in there:
            raise DemoError(
                f"{self.state} holds the state of a platform that is no demo; give another folder with --state: "
                '`etude demo --state .demo`, or `make demo DEMO="--state .demo"`'
            )
        return there

    def _set_aside(self) -> None:
        """An earlier demo's state moves to `<state>/archive/<time>`; any other platform's state is not touched. `demo.json`
        goes last: by it the rest is known as a demo's."""
        if not self._there():
            return
        target = self.state / "archive" / f"{datetime.now(UTC):%Y%m%dT%H%M%S}"
        target.mkdir(parents=True)
        for path in [p for name in LOCAL for p in self.state.glob(f"{name}*")]:
            shutil.move(path, target / path.name)

    # The demo

    async def run(self) -> int:
        ended_by_signals()
        with Supervisor(
            self.state, say=lambda text: self.console.print(text, style="yellow", highlight=False)
        ) as supervisor:
            if self.options.resume:
                self.recall()
            report.require_place(self.options.report)
            specs = default_specs(self.options.base_port)
            require_ports(specs, "give other ones with --base-port (0: free ones)")
            settings = read(ServiceSettings, state=self.state)  # the same adapters as the services'
            objects = stores.connect(settings.objects_url) if self.options.resume else await self.set_up(settings)
            config = self._config(objects)
            bus = buses.connect(settings.bus_url, client="etude-demo")
            supervisor.start(specs)
            page = next((f"; the page: http://127.0.0.1:{s.port}" for s in specs if s.name == "console" and s.port), "")
            self.console.print(
                f"Run {config.run}. {self._command('etude status')} shows the services{page}", highlight=False
            )
            try:
                async with (
                    explained(self.state, self.stalled()),
                    Conductor(bus, objects, config.run, refused=supervisor.refused) as conductor,
                ):
                    return await self._conduct(conductor, supervisor, config, objects)
            finally:
                await bus.close()

    async def set_up(self, settings: ServiceSettings) -> stores.Objects:
        """A new demo, which can be resumed from here on. An earlier one is set aside, late: neither a slip in what the user
        gave nor Ctrl-C while problems are made costs it. Returns the store that holds what the run starts with."""
        started = time.time()
        earlier = self._there()
        options = await in_thread(ready, replace(self.options, state=self.state))
        if earlier:  # else whatever other commands wrote here meanwhile is no demo's, and stays
            self._set_aside()
        self._remember(phase=SET_UP)  # what is written from here on is a demo's
        objects = stores.connect(settings.objects_url)
        config, ref = await asyncio.to_thread(prepare.new_run, objects, options)
        # Not in the thread: it goes on when this is cancelled, and what was stopped must not become a demo afterwards.
        self._remember(
            run=config.run,
            config=msgspec.to_builtins(ref),
            options=asdict(self.options),
            phase="before",
            prepared_s=time.time() - started,
        )
        return objects

    def _config(self, objects: stores.Objects) -> RunConfig:
        return msgspec.json.decode(objects.get(msgspec.convert(self.memory["config"], Ref)), type=RunConfig)

    async def _conduct(
        self, conductor: Conductor, supervisor: Supervisor, config: RunConfig, objects: stores.Objects
    ) -> int:
        options, ref = self.options, msgspec.convert(self.memory["config"], Ref)
        if options.resume:  # figures and versions are told by what was said before
            await conductor.heard()
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
                await conductor.paused()  # the clock of practice stops while the demo is interrupted
                raise
            self._remember(phase="after", serial=conductor.progress.newest_serial)
        if self.memory["phase"] == "after":
            serial = self.memory.get("serial", conductor.progress.newest_serial)
            await conductor.served(serial)
            after = await self._evaluate(conductor, supervisor, config, "after", serial)
            self._remember(phase="report", after=after, serial=serial)
        audit = await asyncio.to_thread(report.audit, self.state, config.run)
        assert config.eval_pack
        outcome = report.Outcome(
            options=options,
            config=config,
            before=self.memory["before"],
            after=self.memory["after"],
            progress=conductor.progress,
            audit=audit,
            prepared_s=float(self.memory.get("prepared_s", 0.0)),
            kinds=await asyncio.to_thread(kinds_of, objects, config.eval_pack),
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
