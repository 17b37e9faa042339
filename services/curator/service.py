"""runs.state (a run whose problems are not all admitted) → gate → problems.admitted, alerts."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import msgspec
import structlog
from prometheus_client import Counter

from services.curator import admission
from services.curator.build import GENERATOR, read_manifest
from services.curator.config import CuratorConfig
from shared.bus import Bus, Delivery
from shared.contracts import probe as probes
from shared.contracts import topics
from shared.contracts.life import RunState
from shared.contracts.messages import Alert, RunStatus
from shared.contracts.run import Ref, RunConfig
from shared.environments import Outcome, Places
from shared.environments.admitting import admitted
from shared.environments.registry import Environments
from shared.objects import ObjectDamaged, ObjectMissing, Objects
from shared.problems.importing import unspeakable
from shared.problems.pack import PARTS, PackError, file_name, read_hidden, read_problems
from shared.problems.schema import Hidden, Problem
from shared.renderers.fitting import misfit
from shared.renderers.registry import load_renderer
from shared.sandbox import SandboxUnavailable
from shared.telemetry import Health
from shared.weights.checkpoint_objects import download_directory

AFTER_ERROR_RETRY_S = 2.0
NO_SANDBOX_RETRY_S = 10.0

_SANDBOX, _GATE = "a sandbox that this machine refuses", "the gate, which checks problems in the sandbox"

log = structlog.get_logger()
PROBLEMS = Counter("etude_curator_problems_total", "Problems that came to the gate, by outcome.", ["run", "outcome"])


class Unusable(ValueError):
    """The run's pack cannot be used, now or later; the text says why."""


async def serve(
    config: CuratorConfig, bus: Bus, objects: Objects, places: Places, health: Health, stop: asyncio.Event
) -> None:
    """Until `stop` is set. A run is acknowledged when all its problems are out; a curator that dies before admits them
    again, in the same batches."""
    curator = Curator(config, bus, objects, places, health)
    async with asyncio.TaskGroup() as group:
        taking = group.create_task(curator.take())
        await stop.wait()
        taking.cancel()


class Curator:
    def __init__(self, config: CuratorConfig, bus: Bus, objects: Objects, places: Places, health: Health) -> None:
        self._config, self._bus, self._objects, self._environments, self._health = (
            config,
            bus,
            objects,
            Environments(places),
            health,
        )
        self._handled: set[str] = set()  # runs whose problems are out, or cannot be used

    async def take(self) -> None:
        async for delivery in self._bus.deliveries([topics.RUNS_STATE], "curator", 4):
            await self._handle(delivery)

    async def _handle(self, delivery: Delivery) -> None:
        message: RunStatus = delivery.message
        if (
            message.admitted
            or message.state is RunState.finished
            or message.run in self._handled
            or not message.configs
        ):
            delivery.done()
            return
        try:
            await self._admit(message.run, message.configs[0])
        except Unusable as error:
            await self._bus.publish(topics.ALERTS, message.run, admission.unusable(message.run, str(error)))
            log.error("pack_unusable", run=message.run, reason=str(error))
        except SandboxUnavailable as error:
            self._health.wait_on(_SANDBOX)
            log.warning("no_sandbox", run=message.run, reason=str(error))
            delivery.retry(NO_SANDBOX_RETRY_S)
            return
        except Exception as error:  # bus or object store away
            log.warning("not_admitted", run=message.run, error=f"{type(error).__name__}: {error}")
            delivery.retry(AFTER_ERROR_RETRY_S)
            return
        self._health.clear(_SANDBOX)
        self._handled.add(message.run)
        delivery.done()

    async def _admit(self, run: str, ref: Ref) -> None:
        config, pairs, known = await asyncio.to_thread(self._load, run, ref)
        alerts: list[Alert] = []
        reasons = {problem.id: f"field {why[0]!r}: {why[1]}" for problem, _ in pairs if (why := unspeakable(problem))}
        reasons |= await asyncio.to_thread(self._misfits, config, pairs)
        fitting = [pair for pair in pairs if pair[0].id not in reasons]
        if await asyncio.to_thread(_made_here, self._config.packs, config):
            passed = [problem for problem, _ in fitting]
        else:
            outcomes = await self._gate(fitting)
            passed = [outcome.problem for outcome in outcomes if not outcome.reason]
            reasons |= {outcome.problem.id: outcome.reason for outcome in outcomes if outcome.reason}
            unproven = [o.problem.id for o in outcomes if not o.reason and not o.proven]
            if unproven:
                alerts.append(admission.unproven(run, unproven, len(pairs)))
        if reasons:
            alerts.append(admission.refused(run, reasons, len(pairs)))
        messages = list(admission.admitted(config, passed, known))
        if messages:
            messages[-1] = msgspec.structs.replace(messages[-1], complete=True)
        await self._bus.publish_many(
            [(topics.PROBLEMS_ADMITTED, next(iter(message.problems)), message) for message in messages]
        )
        await self._bus.publish_many([(topics.ALERTS, run, alert) for alert in alerts])
        PROBLEMS.labels(run, "admitted").inc(len(passed))
        PROBLEMS.labels(run, "refused").inc(len(pairs) - len(passed))
        log.info("admitted", run=run, problems=len(passed), refused=len(pairs) - len(passed), batches=len(messages))

    def _load(self, run: str, ref: Ref) -> tuple[RunConfig, list[tuple[Problem, Hidden]], admission.Known]:
        try:
            config = msgspec.json.decode(self._objects.get(ref), type=RunConfig)
            problems = read_problems(self._objects.get(config.pack))
            surprise = (
                msgspec.json.decode(self._objects.get(config.surprise), type=dict[str, float])
                if config.surprise
                else {}
            )
            hidden = {item.id: item for item in read_hidden(self._objects.get(config.pack_hidden))}
        except (ObjectMissing, ObjectDamaged, PackError, msgspec.DecodeError) as error:
            raise Unusable(f"{type(error).__name__}: {error}") from None
        orphans = [problem.id for problem in problems if problem.id not in hidden]
        if orphans or not problems:
            what = f"{len(orphans)} problems have no hidden part, as {orphans[0]!r}" if orphans else "no problems in it"
            raise Unusable(f"pack {config.pack.key}: {what}")
        pairs = [(problem, hidden[problem.id]) for problem in problems]
        return (
            config,
            pairs,
            admission.Known(surprise, _levels(pairs), self._probed(config, {problem.id for problem in problems})),
        )

    def _probed(self, config: RunConfig, ids: Container[str]) -> dict[str, tuple[int, int]]:
        """Return attempts and solved ones by problem, as the run's probe has them. Raises Unusable."""
        if config.probe is None:
            return {}
        try:
            probe = probes.read(self._objects.get(config.probe))
            probes.require_known(probe, ids, f"the pack {config.pack.key}")
        except (ObjectMissing, ObjectDamaged, probes.BadProbe) as error:
            raise Unusable(f"probe {config.probe.key}: {type(error).__name__}: {error}") from None
        return {name: (one.attempts, one.solved) for name, one in probe.problems.items()}

    def _misfits(self, config: RunConfig, pairs: list[tuple[Problem, Hidden]]) -> dict[str, str]:
        """Problem id -> why the run's policy cannot be shown it. Of a base whose chat format is not known here nothing is
        said: the rollout workers refuse the run by it."""
        directory = self._config.formats / config.base.checksum
        try:
            chat = load_renderer(download_directory(self._objects, config.base, directory, weights=False))
        except (KeyError, ValueError) as error:  # ObjectMissing is a KeyError; so is a card that lacks a field
            log.warning("format_unknown", run=config.run, base=config.base.key, reason=str(error))
            return {}
        found = ((problem.id, misfit(problem, chat, self._environments)) for problem, _ in pairs)
        return {name: f"{chat.name}: {objection}" for name, objection in found if objection}

    async def _gate(self, pairs: list[tuple[Problem, Hidden]]) -> list[Outcome]:
        def still_waiting(done: int) -> None:
            self._health.wait_on(_GATE)

        still_waiting(0)
        outcomes = await admitted(self._environments, pairs, still_waiting, self._config.curator_batch)
        self._health.clear(_GATE)
        return outcomes


def _levels(pairs: list[tuple[Problem, Hidden]]) -> dict[str, list[str]]:
    """Return the tags of the problems that have levels."""
    return {problem.id: tags for problem, hidden in pairs if (tags := problem.levels(hidden))}


def _made_here(packs: Path, config: RunConfig) -> bool:
    """Whether both parts of the pack are, byte for byte, one split of a pack that this generator made and checked here."""
    for manifest in _manifests(packs):
        checksums = manifest.get("checksums", {})
        for split in manifest.get("splits", {}):
            public, hidden = (checksums.get(file_name(split, part)) for part in PARTS)
            if (public, hidden) == (config.pack.checksum, config.pack_hidden.checksum):
                return manifest.get("verified") is True and manifest.get("generator") == GENERATOR
    return False


def _manifests(packs: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(packs.glob("*/manifest.json")):
        manifest = read_manifest(path.parent)
        if manifest is not None:
            yield manifest
