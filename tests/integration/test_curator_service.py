"""The curator on the embedded bus and store: what it admits, refuses, trusts, and does twice."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

import etude
from services.curator import build
from services.curator.config import CuratorConfig
from services.curator.service import serve
from shared import bus as buses
from shared import objects as stores
from shared import sandbox
from shared.bus import Bus
from shared.contracts import topics
from shared.contracts.messages import Alert, ProblemAdmitted
from shared.contracts.run import Ref, RunConfig
from shared.environments import Places
from shared.objects import Objects
from shared.problems import Case, FunctionHidden, FunctionProblem
from shared.problems.pack import write
from shared.telemetry import Health
from shared.weights.checkpoint_objects import upload_directory
from tests.patience import eventually, patient
from tests.ruling import status

RUN = "r-test"
BASE = Path(etude.__file__).parent / "data" / "base"
MISFITS = {
    "two": {"f.py": "def f(a):\n    return a - 1\n", "g.py": ""},
    "long": {"f.py": "def f(a):\n    return a - 1\n" + "# a\n" * 60},
}


def pair(name: str, *, broken: str = "a - 1", solution: str | None = "a + 1") -> tuple[FunctionProblem, FunctionHidden]:
    return (
        FunctionProblem(
            id=name,
            files={"f.py": f"def f(a):\n    return {broken}\n"},
            entry="f",
            visible=[Case(args="[1]", expected="2")],
            cell="f",
        ),
        FunctionHidden(
            id=name,
            cases=[Case(args="[5]", expected="6")],
            solution={} if solution is None else {"f.py": f"def f(a):\n    return {solution}\n"},
        ),
    )


def policy(directory: Path) -> Path:
    """What tells the chat format of the base policy."""
    directory.mkdir()
    for name in ("config.json", "etude.json", "tokenizer.json"):
        shutil.copy(BASE / name, directory / name)
    return directory


@dataclass
class World:
    config: CuratorConfig
    bus: Bus
    objects: Objects

    def pack(self, pairs: list[tuple[FunctionProblem, FunctionHidden]]) -> tuple[Ref, Ref]:
        public = self.objects.put("packs/a.public", write(problem for problem, _ in pairs))
        return public, self.objects.put("packs/a.hidden", write(hidden for _, hidden in pairs))

    async def start(
        self, pack: Ref, pack_hidden: Ref, run: str = RUN, base: Ref | None = None, probe: Ref | None = None
    ) -> None:
        config = RunConfig(run=run, base=base or pack, pack=pack, pack_hidden=pack_hidden, probe=probe)
        ref = self.objects.put(f"runs/{run}/config.json", msgspec.json.encode(config))
        await self.bus.publish(topics.RUNS_STATE, run, status(run, "running", ref))

    async def collect(self, messages: int) -> tuple[list[ProblemAdmitted], list[Alert]]:
        """Reads both topics from their beginning until so many messages are there."""
        found: list[ProblemAdmitted | Alert] = []
        async for delivery in self.bus.deliveries([topics.PROBLEMS_ADMITTED, topics.ALERTS], None, 64):
            found.append(delivery.message)
            delivery.done()
            if len(found) == messages:
                break
        alerts = [message for message in found if isinstance(message, Alert)]
        return [message for message in found if isinstance(message, ProblemAdmitted)], alerts

    async def life(self, until: Callable[[], Awaitable[None]]) -> None:
        """One life of the service."""
        functions, stop = sandbox.connect("process", 1), asyncio.Event()
        async with Health("curator", self.config) as health, asyncio.TaskGroup() as group:
            group.create_task(serve(self.config, self.bus, self.objects, Places(functions=functions), health, stop))
            await until()
            stop.set()
        await functions.close()


def play(tmp_path: Path, scene: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        config = CuratorConfig(state=tmp_path / "state", packs=tmp_path / "packs", sandbox="process", curator_batch=2)
        bus = buses.connect(config.bus_url, client="test")
        try:
            async with asyncio.timeout(patient(60)):
                await scene(World(config, bus, stores.connect(config.objects_url)))
        finally:
            await bus.close()

    asyncio.run(run())


def test_only_what_its_solution_solves_and_its_broken_state_does_not_is_admitted(tmp_path: Path):
    async def scene(world: World) -> None:
        pairs = [
            pair("good"),
            pair("already-right", broken="a + 1"),
            pair("wrong-solution", solution="a + 2"),
            pair("endless-solution", solution="[0 for _ in iter(int, 1)]"),
            pair("no-solution", solution=None),
        ]
        await world.start(*world.pack(pairs))

        async def until() -> None:
            admitted, alerts = await world.collect(3)
            assert [batch.problems for batch in admitted] == [
                {"good": ("debugging", "f"), "no-solution": ("debugging", "f")}
            ]
            by_name = {alert.name: alert for alert in alerts}
            reasons = dict(example.split(": ", 1) for example in by_name["problems_refused"].examples)
            assert reasons["already-right"].startswith("no-op: ")
            assert reasons["wrong-solution"] == "oracle: the solution gives 3 for visible[0], expected 2"
            assert "Timeout" in reasons["endless-solution"]
            assert by_name["problems_unproven"].examples == ["no-solution"]

        await world.life(until)

    play(tmp_path, scene)


def test_a_problem_whose_names_fit_no_message_is_refused_and_keeps_no_other_back(tmp_path: Path):
    async def scene(world: World) -> None:
        problem, hidden = pair("wide")
        wide = (msgspec.structs.replace(problem, cell="c" * 70_000), hidden)
        await world.start(*world.pack([pair("i" * 70_000), pair("two\nlines"), wide, pair("good")]))

        async def until() -> None:
            admitted, [alert] = await world.collect(2)
            assert [batch.problems for batch in admitted] == [{"good": ("debugging", "f")}]
            assert [example.split(": ", 1)[0][:10] for example in alert.examples] == ["i" * 10, "two\nlines", "wide"]
            assert "field 'cell': found " in alert.examples[2]

        await world.life(until)

    play(tmp_path, scene)


def test_a_pack_made_here_passes_without_a_second_gate_and_a_changed_one_does_not(tmp_path: Path):
    async def scene(world: World) -> None:
        wrong = [pair("p1", solution="a + 2"), pair("p2")]  # the gate would refuse p1: only trust lets it pass
        build.write_own(tmp_path / "packs" / "mine", {"rl": wrong}, world.objects)
        refs = [
            world.objects.put_file(f"packs/{part}", tmp_path / "packs" / "mine" / f"rl.{part}.jsonl.zst")
            for part in ("public", "hidden")
        ]
        await world.start(refs[0], refs[1])
        await world.start(*world.pack([*wrong, pair("p3")]), run="r-other")

        async def until() -> None:
            admitted, alerts = await world.collect(3)
            problems = {batch.run: sorted(batch.problems) for batch in admitted}
            assert problems == {RUN: ["p1", "p2"], "r-other": ["p2", "p3"]}
            assert [alert.run for alert in alerts] == ["r-other"]

        await world.life(until)

    play(tmp_path, scene)


def test_what_the_policy_of_a_run_cannot_be_shown_is_refused_with_its_reason_even_from_a_pack_made_here(tmp_path: Path):
    async def scene(world: World) -> None:
        base = upload_directory(world.objects, "base", policy(tmp_path / "policy"))
        two, long = (msgspec.structs.replace(pair(name)[0], files=files) for name, files in MISFITS.items())
        pairs = [(two, pair("two")[1]), pair("good"), (long, pair("long")[1])]
        build.write_own(tmp_path / "packs" / "mine", {"rl": pairs}, world.objects)
        refs = [
            world.objects.put_file(f"packs/{part}", tmp_path / "packs" / "mine" / f"rl.{part}.jsonl.zst")
            for part in ("public", "hidden")
        ]
        await world.start(refs[0], refs[1], base=base)
        await world.start(*world.pack([*pairs, pair("right", broken="a + 1")]), run="r-other", base=base)

        async def until() -> None:
            admitted, alerts = await world.collect(4)
            assert {batch.run: list(batch.problems) for batch in admitted} == {RUN: ["good"], "r-other": ["good"]}
            reasons = {
                alert.run: dict(example.split(": ", 1) for example in alert.examples)
                for alert in alerts
                if alert.name == "problems_refused"
            }
            misfits = {
                "two": "compact-1: field 'files': found 2 files (f.py, g.py); allowed: exactly one",
                "long": "compact-1: field 'files[f.py]': found 62 lines; allowed: at most 48",
            }
            assert reasons[RUN] == misfits
            assert reasons["r-other"].pop("right").startswith("no-op: ")
            assert reasons["r-other"] == misfits

        await world.life(until)

    play(tmp_path, scene)


def test_a_run_that_is_over_refused_or_admitted_is_passed_over(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        (ref,) = [world.objects.put("runs/r-old/config.json", b"not read")]
        for told in (
            status("r-old", "paused", ref, admitted=True),
            status("r-old", "finished"),
            status("r-refused", "finished"),
        ):
            await world.bus.publish(topics.RUNS_STATE, told.run, told)
        pack = world.pack([pair("p")])
        await world.start(*pack)
        await world.bus.publish(topics.RUNS_STATE, RUN, status(RUN, "paused"))  # it is not admitted again for that

        async def both() -> None:
            await world.start(*pack, run="r-later")
            admitted, alerts = await world.collect(2)
            assert ([batch.run for batch in admitted], alerts) == ([RUN, "r-later"], [])

        await world.life(both)

    play(tmp_path, scene)


def test_a_run_is_admitted_once_over_many_lives_and_a_lost_acknowledgement_repeats_the_same_batches(tmp_path: Path):
    async def scene(world: World) -> None:
        await world.start(*world.pack([pair(f"p{index}") for index in range(5)]))

        async def acknowledged() -> bool:
            return not (await world.bus.lag([topics.RUNS_STATE], "curator"))[topics.RUNS_STATE.name]

        async def first() -> None:
            await world.collect(1)
            await eventually(acknowledged, "the curator to acknowledge the run's state")

        await world.life(first)
        await world.start(*world.pack([pair("later")]), run="r-later")

        async def second() -> None:
            admitted, _ = await world.collect(2)
            assert [batch.run for batch in admitted] == [RUN, "r-later"]

        await world.life(second)
        await world.start(*world.pack([pair(f"p{index}") for index in range(5)]))  # as after a crash before the commit

        async def third() -> None:
            admitted, _ = await world.collect(3)
            assert admitted[0] == admitted[2]

        await world.life(third)

    play(tmp_path, scene)


def test_what_a_probe_found_out_of_admitted_problems_is_passed_on_and_a_probe_of_others_is_an_alert(tmp_path: Path):
    def probe(world: World, *names: str) -> Ref:
        tried = {name: {"attempts": 4, "solved": 1} for name in names}
        data = msgspec.json.encode({"version": 1, "problems": tried})
        return world.objects.put(f"runs/{names[0]}/probe.json", data)

    async def scene(world: World) -> None:
        refs = world.pack([pair("good"), pair("untried"), pair("wrong", solution="a + 2")])
        await world.start(*refs, probe=probe(world, "good", "wrong"))
        await world.start(*refs, run="r-other", probe=probe(world, "stranger"))
        gone = Ref(key="runs/gone/probe.json", size=1, checksum="0" * 32)
        await world.start(*refs, run="r-gone", probe=gone)

        async def until() -> None:
            [admitted], alerts = await world.collect(4)
            assert sorted(admitted.problems) == ["good", "untried"]
            assert admitted.probed == {"good": (4, 1)}
            texts = {alert.run: alert.what for alert in alerts if alert.name == "pack_unusable"}
            assert "problems: found 'stranger'; allowed: ids of the pack packs/a.public" in texts["r-other"]
            assert texts["r-gone"].startswith("probe runs/gone/probe.json: ObjectMissing")

        await world.life(until)

    play(tmp_path, scene)


def test_a_pack_that_cannot_be_read_is_an_alert_and_stops_nobody(tmp_path: Path):
    async def scene(world: World) -> None:
        public, hidden = world.pack([pair("a")])
        await world.start(hidden, hidden, run="r-mixed")
        await world.start(world.objects.put("packs/junk", b"junk"), hidden, run="r-junk")
        other = world.objects.put("packs/other", write([pair("b")[1]]))
        await world.start(public, other, run="r-orphans")
        await world.start(public, hidden)

        async def until() -> None:
            admitted, alerts = await world.collect(4)
            assert [batch.run for batch in admitted] == [RUN]
            texts = {alert.run: alert.what for alert in alerts if alert.name == "pack_unusable"}
            assert sorted(texts) == ["r-junk", "r-mixed", "r-orphans"]
            assert "no zstd data" in texts["r-junk"]
            assert "as 'a'" in texts["r-orphans"]

        await world.life(until)

    play(tmp_path, scene)
