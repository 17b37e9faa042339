"""`GET /hardness`: read-only, from a snapshot of the ledger; it never touches what the scheduler decides from.

Whoever reaches the scheduler's port may ask, as with /metrics. A run is read at most every `FRESH_S` seconds, and less often
where that takes long: a large ledger is not read all the time because somebody looks at a page.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web
from sqlalchemy import Engine, select
from sqlalchemy.exc import DBAPIError

from services.scheduler.config import SchedulerConfig
from services.scheduler.rows import TABLES
from services.scheduler.standing import BadQuery, Last, Query, Standing
from services.scheduler.store import Store
from shared import ledger
from shared import objects as stores
from shared.contracts.run import RunConfig
from shared.contracts.standing import HardnessPage, ProblemWhy
from shared.objects import ObjectDamaged, ObjectMissing, Objects

FRESH_S = 10.0
PATIENT = 10.0  # × the time that reading took
KEPT = 2  # runs


class UnknownRun(LookupError):
    pass


class UnknownProblem(LookupError):
    """The text names the run and the problem."""


class Snapshots:
    """Blocking; one thread reads at a time."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._objects: Objects | None = None
        self._kept: dict[str, tuple[float, Standing]] = {}  # run -> (until, …)

    def page(self, run: str, query: Query) -> HardnessPage:
        """Raises UnknownRun, and what the ledger raises while it is away."""
        with self._lock:
            return self._standing(run).page(query, lambda problems: self._results(run, problems))

    def problem(self, run: str, problem: str) -> ProblemWhy:
        """Raises UnknownRun, UnknownProblem, and what the ledger raises while it is away."""
        with self._lock:
            try:
                return self._standing(run).why(problem, lambda problems: self._results(run, problems))
            except KeyError:
                raise UnknownProblem(f"problem {problem!r}: run {run!r} has not admitted it") from None

    def _standing(self, run: str) -> Standing:
        started = time.monotonic()
        until, known = self._kept.pop(run, (0.0, None))
        if known is None or started >= until:
            if self._engine is None:
                self._engine = ledger.connect(self._config.ledger_url, read_only=True)
            ws = Store(self._engine).load(run, time.time())
            if ws is None:
                raise UnknownRun(run)
            if ws.head.config is not None:
                ws.config = self._run_config(ws.head.config)
            known = Standing(ws)
            took = time.monotonic() - started
            until = started + took + max(FRESH_S, PATIENT * took)
        self._kept[run] = (until, known)
        while len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]
        return known

    def _run_config(self, ref: Any) -> RunConfig | None:
        """None: it cannot be had, and weights are shown as if hardness decided."""
        try:
            if self._objects is None:
                self._objects = stores.connect(self._config.objects_url)
            return msgspec.json.decode(self._objects.get(ref), type=RunConfig)
        except (ObjectMissing, ObjectDamaged, msgspec.MsgspecError, OSError):
            return None

    def _results(self, run: str, problems: Sequence[str]) -> dict[str, Last]:
        """Of each problem's last group."""
        assert self._engine
        g = TABLES["groups"]
        query = (
            select(g.c.problem_id, g.c.members, g.c.solved, g.c.step, g.c.reason, g.c.state)
            .where(g.c.run_id == run, g.c.problem_id.in_(list(problems)), g.c.state != "open")
            .order_by(g.c.number)
        )
        with self._engine.begin() as connection:
            return {
                row.problem_id: Last(row.members, row.solved, row.step if row.members else -1, row.reason)
                for row in connection.execute(query)
            }


def app(config: SchedulerConfig) -> web.Application:
    snapshots = Snapshots(config)

    async def hardness(request: web.Request) -> web.Response:
        """`?run=RUN` and what `Query` knows."""
        run = request.query.get("run", "")
        try:
            query = Query.parse(request.query)
            if not (run.isprintable() and 0 < len(run) <= 200):
                raise BadQuery(f"run: found {run[:80]!r}; allowed: a run's id")
            page = await asyncio.to_thread(snapshots.page, run, query)
        except BadQuery as error:
            return web.json_response({"error": str(error)}, status=400)
        except UnknownRun:
            return web.json_response({"error": f"run {run!r}: the ledger has never heard of it"}, status=404)
        except (DBAPIError, OSError) as error:
            said = str(error.orig) if isinstance(error, DBAPIError) else str(error)
            return web.json_response({"error": f"the ledger cannot be read: {said}"}, status=503)
        return web.Response(body=msgspec.json.encode(page), content_type="application/json")

    made = web.Application()
    made.add_routes([web.get("/hardness", hardness)])
    return made
