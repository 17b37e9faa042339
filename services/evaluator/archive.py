"""Where evaluations lie in the object store, so that a restart finds them as they were.

evals/open/<run>/<eval>.json                 the request and when it was accepted, until the report is announced
runs/<run>/evals/<eval>/parts/<hash>.jsonl   results, a few at a time, in no order
runs/<run>/evals/<eval>/report.json          the report
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import structlog
import xxhash

from services.evaluator.plan import Result
from shared.contracts.ids import OPEN_EVALUATIONS, REPORT, evaluation_prefix, open_evaluation
from shared.contracts.messages import EvalRequested
from shared.contracts.run import Ref, RunConfig
from shared.objects import ObjectDamaged, ObjectMissing, Objects
from shared.problems import Problem
from shared.problems.pack import read_problems

log = structlog.get_logger()


class _Opened(msgspec.Struct):
    """Beside an open request's own fields."""

    opened: float = 0.0


class Archive:
    """Blocking; call it off the event loop."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def open(self, request: EvalRequested, at: float) -> None:
        """`at`: Unix seconds, which give the order after a restart. What is open already keeps its own."""
        key = open_evaluation(request.run, request.eval)
        try:
            self._objects.head(key)
        except ObjectMissing:
            self._objects.put(key, msgspec.json.encode({**msgspec.to_builtins(request), "opened": at}))

    def all_open(self) -> list[EvalRequested]:
        """In the order in which they were accepted. One that cannot be read is said, and keeps nobody else waiting."""
        found: list[tuple[float, EvalRequested]] = []
        for key in sorted(self._objects.list(OPEN_EVALUATIONS)):
            try:
                data = self._read(key)
                opened = msgspec.json.decode(data, type=_Opened).opened
                found.append((opened, msgspec.json.decode(data, type=EvalRequested)))
            except (ObjectMissing, ObjectDamaged, msgspec.MsgspecError) as error:
                log.error("open_evaluation_unreadable", key=key, error=f"{type(error).__name__}: {error}")
        return [request for _, request in sorted(found, key=lambda pair: pair[0])]

    def keep(self, request: EvalRequested, results: Sequence[Result]) -> None:
        data = msgspec.json.Encoder().encode_lines(results)
        self._objects.put(f"{_folder(request)}/parts/{xxhash.xxh3_128_hexdigest(data)}.jsonl", data)

    def results(self, request: EvalRequested) -> list[Result]:
        decoder = msgspec.json.Decoder(Result)
        parts = sorted(self._objects.list(f"{_folder(request)}/parts/"))
        return [result for key in parts for result in decoder.decode_lines(self._read(key))]

    def report(self, request: EvalRequested, report: dict[str, Any]) -> Ref:
        return self._objects.put(f"{_folder(request)}/{REPORT}", msgspec.json.encode(report))

    def known_report(self, request: EvalRequested) -> tuple[Ref, dict[str, Any]] | None:
        """The report of an evaluation that ended before, for a request that comes again. None: there is none that can be
        read; it is measured, perhaps once more."""
        try:
            ref = self._objects.head(f"{_folder(request)}/{REPORT}")
            return ref, msgspec.json.decode(self._objects.get(ref), type=dict[str, Any])
        except ObjectMissing:
            return None
        except (ObjectDamaged, msgspec.MsgspecError) as error:
            log.error("report_unreadable", run=request.run, eval=request.eval, error=f"{type(error).__name__}: {error}")
            return None

    def close(self, request: EvalRequested) -> None:
        """The report holds all results now."""
        self._objects.delete(open_evaluation(request.run, request.eval))
        for key in list(self._objects.list(f"{_folder(request)}/parts/")):
            self._objects.delete(key)

    def pack(self, ref: Ref) -> list[Problem]:
        return read_problems(self._objects.get(ref))

    def run(self, run: str) -> RunConfig:
        """Raises ObjectMissing for an unknown run."""
        return msgspec.json.decode(self._read(f"runs/{run}/config.json"), type=RunConfig)

    def _read(self, key: str) -> bytes:
        return self._objects.get(self._objects.head(key))


def _folder(request: EvalRequested) -> str:
    return evaluation_prefix(request.run, request.eval)
