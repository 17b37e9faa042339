"""One batch: messages in, one transaction, messages out; where a fork comes among them two, for what it frees is read from the
ledger: what came before it, and the rest. Synchronous; the service runs it in a thread.

A message that cannot be applied never stops the others: it comes back as refused, with the reason, for the dead-letter
topic. Whatever goes wrong with a batch that is not an outage (what the tables refuse, a number that no column holds, an
answer too large to send) is one message's doing until tried alone; a message is blamed only where the desk can go on
without it. After any failure the working sets are thrown away, all of them are loaded anew, also those of runs that the
batch does not mention, and the same batch is applied to what the ledger says.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import structlog
import xxhash
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from services.scheduler import control, decisions, intake, recovery, requesting
from services.scheduler.decisions import Limits
from services.scheduler.listening import Listening
from services.scheduler.records import Changes, Head, Message
from services.scheduler.shares import Accounts
from services.scheduler.store import Fenced, Store
from services.scheduler.working_set import WorkingSet
from shared.contracts import messages as m
from shared.contracts.life import RunState
from shared.contracts.topics import Topic

log = structlog.get_logger()

TOO_LARGE = "54"  # class of SQLSTATE: a limit of the program, as of a name that is too long for an index
KEEP_FINISHED_S = 60.0  # a finished run stays in memory for its last words
LISTENED_EVERY_S = 2.0  # while a run goes on, the ledger learns at least so often that somebody listens
# Any of these may be the first that is heard of a run: topics are not ordered among each other.
_FIRST_WORDS = (m.RunCommand, m.ProblemAdmitted, m.PolicyPublished, m.PolicyApplied, m.IncarnationStarted)


class Received(Protocol):
    """What the desk needs of a delivery."""

    topic: Topic
    message: Any
    offset: int


@dataclass(slots=True)
class Result:
    """`refused`: index in the batch -> why. `outbox`: (run, message), committed, to be published in this order.
    `waits`: what the runs wait on, in words."""

    refused: dict[int, str] = field(default_factory=dict)
    outbox: list[tuple[str, Message]] = field(default_factory=list)
    waits: set[str] = field(default_factory=set)


class _Unwritable(Exception):
    """What cannot be written although the ledger is there. Which message said it, only trying them alone can tell."""


class _Stumbled(Exception):
    """A message raised what it should not: the batch is done again without it."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index, self.reason = index, reason


class Desk:
    """`term`: of the leadership under which it writes (None: alone by agreement, in tests). `read_config` fetches a run
    configuration from the object store, `read_checkpoint` what a run's newest checkpoint contains, `read_begun` the trainers
    that claimed the run after an incarnation, `read_newest` the newest version, from a known one on. Seconds: see
    `decisions.Limits`."""

    def __init__(
        self,
        store: Store,
        read_config: control.ReadConfig,
        *,
        term: int | None = None,
        attempt_s: float = 900.0,
        grading_s: float = 600.0,
        replica_patience_s: float = 60.0,
        read_checkpoint: Callable[[str], recovery.Checkpointed | None] = lambda run: None,
        read_begun: Callable[[str, int], Sequence[m.IncarnationStarted]] = lambda run, after: (),
        read_newest: Callable[[str, int], int] = lambda run, known: known,
    ) -> None:
        self.store = store
        self.read_config, self.read_checkpoint = read_config, read_checkpoint
        self.read_begun, self.read_newest = read_begun, read_newest
        self.term = term
        self.sets: dict[str, WorkingSet] = {}
        self._limits = (attempt_s, grading_s, replica_patience_s)
        self._listening = Listening()
        self._requests_unread: bool | None = None
        self._started = False
        self._echoed: dict[str, int] = {}  # run -> the greatest number of a status that has come back
        self._announced = False  # how the runs stand that we found in the ledger
        self._accounts = Accounts()  # of the runs that run at the same time
        self._early: list[tuple[str, Message]] = []  # committed in the middle of a batch, not handed out yet
        self._listened_at = float("-inf")  # when it was last written down how long we have listened
        self._version = _code_version()

    def overdue(self, now: float) -> bool:
        """Whether an attempt would be given up for silence now, if somebody listened all the while."""
        return any(decisions.overdue(ws, now, self._now_limits()) for ws in self.sets.values())

    def idle(self, now: float) -> bool:
        """Whether requests would be repeated now, if the bus held none."""
        return any(decisions.idle(ws, now, self._now_limits()) for ws in self.sets.values())

    def handle(
        self,
        batch: Sequence[Received],
        now: float,
        published: dict[str, int] | None = None,
        *,
        listening: bool = True,
        read_upto: float | None = None,
        requests_unread: bool | None = None,
    ) -> Result:
        """Apply the batch, decide, commit. `published`: per run, how far the outbox has been published. `listening` False:
        nobody knows what the bus holds, so silence is nobody's fault. `read_upto`: everything that workers and graders said
        before this time has been handled; None: all of it, as far as is known. `requests_unread`: see `decisions.Limits`.

        Raises Fenced when another scheduler leads, and what the database or the object store raise when they are away:
        the same batch can be handled again then, nothing is lost and nothing counts twice.
        """
        if self._listening.last is None and (before := self.store.listening()) is not None:
            self._listening.resume(before)
        self._listening.batch(now, heard=listening, upto=read_upto)
        self._requests_unread = requests_unread
        refused: dict[int, str] = {}
        again = True
        while True:
            try:
                return self._once(batch, now, published or {}, refused)
            except _Stumbled as stumbled:
                self._forget()
                refused[stumbled.index] = stumbled.reason
            except Exception as error:
                self._forget()
                if _is_outage(error):
                    raise
                if again:  # a commit whose answer was lost may have landed after we looked: then nothing is wrong
                    again = False
                    continue
                if len(batch) > 1:
                    return self._one_by_one(batch, now, published)
                if refused or not batch:
                    raise
                without = self._again([], now, published)  # raises: then the message is not to blame
                log.exception("message_refused_by_ledger", message=repr(batch[0].message)[:500])
                without.refused[0] = f"the ledger refuses what it says: {_words(error)}"
                return without
            except BaseException:
                self._forget()
                raise

    def _again(self, batch: Sequence[Received], now: float, published: dict[str, int] | None) -> Result:
        """The same moment, with less."""
        upto, unread = self._listening.upto, self._requests_unread
        return self.handle(batch, now, published, read_upto=upto, requests_unread=unread)

    def _forget(self) -> None:
        self.sets.clear()
        self._started = False

    def _now_limits(self) -> Limits:
        return Limits(*self._limits, listening=self._listening, requests_unread=self._requests_unread)

    def _one_by_one(self, batch: Sequence[Received], now: float, published: dict[str, int] | None) -> Result:
        whole = Result()
        for index, received in enumerate(batch):
            result = self._again([received], now, published)
            if result.refused:
                whole.refused[index] = result.refused[0]
            whole.outbox.extend(result.outbox)
            whole.waits = result.waits
        return whole

    def _once(
        self, batch: Sequence[Received], now: float, published: dict[str, int], refused: dict[int, str]
    ) -> Result:
        result = Result(refused=dict(refused))
        if not self._started:
            for run in self.store.active():
                ws = self._open(run, now)
                if ws is not None and ws.started and not self._announced:
                    ws.say_state(now)  # perhaps to a bus that was made anew, or is new to services of this release
            self._started = True
        gone = self._gone(batch, now)
        for index, received in enumerate(batch):
            if index in refused or not intake.concerns(received.message):
                continue
            try:
                self._apply(received, now, gone)
            except control.Refused as why:
                result.refused[index] = str(why)
            except (Fenced, DBAPIError, OSError, _Unwritable):
                raise
            except Exception as error:
                log.exception("message_stumbled", topic=received.topic.name, message=repr(received.message)[:500])
                raise _Stumbled(index, f"{type(error).__name__}: {error}") from error
        result.waits |= self._decide(now)
        self._commit(now, published, result)
        self._announced = True
        self._let_go(now)
        return result

    def _decide(self, now: float) -> set[str]:
        """Return what the runs wait on, in words."""
        waits: set[str] = set()
        limits = self._now_limits()
        several = len(self._running()) > 1
        for ws in self.sets.values():
            again = [group for group in decisions.unannounced(ws) if not group.attempts]
            if again:
                self.store.load_members(ws, again, now)
            ws.use = None
            waits |= decisions.decide(ws, now, limits, asks=not several)
        if several:
            waits |= requesting.request_among(self._running(), self._accounts, now, limits.replica_patience_s)
        else:
            self._accounts.forget()
        return waits

    def _running(self) -> list[WorkingSet]:
        """Return the runs that may ask for attempts."""
        return [ws for ws in self.sets.values() if ws.config is not None and ws.head.state is RunState.running]

    def _apply(self, received: Received, now: float, gone: dict[str, dict[str, int]]) -> None:
        message = received.message
        if isinstance(message, m.RunStatus):
            return self._echo(message, now)
        if isinstance(message, m.Alert) and message.run == m.EVERY_RUN:
            for concerned in list(self.sets.values()):
                if self._first_time(concerned, received):
                    self._take(concerned, received, now, gone)
            return
        if isinstance(message, m.AttemptHeartbeat | m.AttemptCheckpointed | m.Alert) and message.run not in self.sets:
            # Of a run that nothing trains, or not yet. Workers that measure a finished run's versions say so every few
            # seconds: to read its whole record each time would hold up the run that goes on.
            return
        ws = self._open(message.run, now, begin=isinstance(message, _FIRST_WORDS))
        if ws is None:
            raise control.Refused(f"run {message.run!r}: the ledger never heard of it")
        if isinstance(message, m.RunCommand | m.Alert) and not self._first_time(ws, received):
            return
        self._take(ws, received, now, gone)
        if ws.forked:
            self._take(self._again_from_ledger(ws, now), received, now, gone)
        if isinstance(message, m.PolicyApplied):
            for other in self.sets.values():
                intake.leave(other, message, now)

    def _echo(self, status: m.RunStatus, now: float) -> None:
        """Take note of our own status. If a newer one has come back before it, a scheduler that had stood still published it late:
        compaction would leave it as the run's last. Then announce again how the run stands."""
        newest = self._echoed.get(status.run, 0)
        self._echoed[status.run] = max(newest, status.number)
        if status.number < newest and (ws := self._open(status.run, now)) is not None:
            ws.say_state(now)

    def _again_from_ledger(self, ws: WorkingSet, now: float) -> WorkingSet:
        """The lineage changed, and the groups that it freed are in the ledger only. Write what is, and load it again."""
        self._write([ws], {}, now)
        self._early.extend((ws.id, one) for one in ws.changes.outbox)
        self.sets.pop(ws.id, None)
        loaded = self._open(ws.id, now, before=ws)
        assert loaded is not None
        loaded.remember(ws)
        return loaded

    def _take(self, ws: WorkingSet, received: Received, now: float, gone: dict[str, dict[str, int]]) -> None:
        message, known = received.message, gone.get(ws.id, {})
        intake.apply(ws, message, now, gone=known, read_config=self.read_config, topic=received.topic)

    def _first_time(self, ws: WorkingSet, received: Received) -> bool:
        """Pause and resume depend on their order, and an alert pauses, so a repeated delivery must not count."""
        said = received.message
        if isinstance(said, m.RunCommand):  # one without an id gets another each time that it is read
            said = msgspec.structs.replace(said, id="")
        digest = xxhash.xxh3_128_hexdigest(msgspec.json.encode(said))
        topic, offset = received.topic.name, received.offset
        row = {"run_id": ws.id, "topic": topic, "position": offset, "digest": digest}
        inbox = ws.changes.rows.setdefault("inbox", [])
        if row in inbox or self.store.handled(ws.id, topic, offset, digest):
            return False
        inbox.append(row)
        return True

    def _open(
        self, run: str, now: float, *, begin: bool = False, before: WorkingSet | None = None
    ) -> WorkingSet | None:
        """From memory, from the ledger, or with `begin` a new run. None: nobody knows it. `before`: see `loading.load`."""
        loaded = run not in self.sets
        ws = self.store.load(run, now, before) if loaded else self.sets[run]
        if ws is None and begin:
            ws = WorkingSet(Head(run_id=run, created_at=now, code_version=self._version))
            ws.event(now, "run.announced", "")
        if ws is None:
            return None
        if ws.config is None and ws.head.config is not None:
            try:
                ws.config = self.read_config(ws.head.config)
            except control.UNREADABLE as error:
                what = f"the configuration {ws.head.config.key} cannot be read any more: {error}"
                ws.alert(now, "configuration", "critical", what, [])
        over = ws.head.state in (RunState.announced, RunState.finished)
        if loaded and not over and before is None and (unheard := self.read_begun(run, ws.lineage.current)):
            for one in unheard:
                intake.start_incarnation(ws, one, now)
            return self._again_from_ledger(ws, now)
        if loaded and not over and ws.head.incarnation >= 0:
            ws.evident = self.read_newest(run, max(ws.policies, default=-1))
        if loaded and not over and (saved := self.read_checkpoint(run)) is not None:
            recovery.recover(ws, saved, now)
        self.sets[run] = ws
        return ws

    def _gone(self, batch: Sequence[Received], now: float) -> dict[str, dict[str, int]]:
        """Attempts of this batch that no working set holds: late words about what is over, or strangers."""
        missing: dict[str, set[str]] = {}
        for received in batch:
            key = getattr(received.message, "key", None)
            if isinstance(key, m.AttemptKey) and intake.concerns(received.message):
                ws = self._open(received.message.run, now)
                if ws is not None and key.attempt not in ws.attempts:
                    missing.setdefault(ws.id, set()).add(key.attempt)
        return {run: self.store.gone(run, names) for run, names in missing.items()}

    def _commit(self, now: float, published: dict[str, int], result: Result) -> None:
        changed = [ws for ws in self.sets.values() if ws.changes]
        unsaid = now - self._listened_at >= LISTENED_EVERY_S and any(
            ws.head.state is not RunState.finished for ws in self.sets.values()
        )
        if changed or published or unsaid:
            self._write(changed, published, now, self._listening.state())
            self._listened_at = now
        result.outbox, self._early = self._early, []
        for ws in changed:
            result.outbox.extend((ws.id, one) for one in ws.changes.outbox)
            ws.changes = Changes()

    def _write(
        self, sets: list[WorkingSet], published: dict[str, int], now: float, listening: dict[str, Any] | None = None
    ) -> None:
        try:
            self.store.commit(sets, published, now, self.term, listening)
        except Exception as error:
            if _is_outage(error):
                raise
            raise _Unwritable(_words(error)) from error

    def _let_go(self, now: float) -> None:
        for run, ws in list(self.sets.items()):
            if ws.head.state is RunState.finished and now - (ws.head.finished_at or now) > KEEP_FINISHED_S:
                del self.sets[run]


def _is_outage(error: Exception) -> bool:
    """Whether the same can succeed later: another leads, or a store is away."""
    if isinstance(error, IntegrityError | DataError) or _sqlstate(error).startswith(TOO_LARGE):
        return False
    return isinstance(error, Fenced | DBAPIError | OSError)


def _sqlstate(error: Exception) -> str:
    """Return PostgreSQL's code of an error; "": it has none."""
    return getattr(getattr(error, "orig", None), "sqlstate", None) or ""


def _words(error: Exception) -> str:
    if isinstance(error, DBAPIError):
        return str(error.orig)
    return str(error) if isinstance(error, _Unwritable) else f"{type(error).__name__}: {error}"


def _code_version() -> str:
    try:
        return f"etude {importlib.metadata.version('etude')}"
    except importlib.metadata.PackageNotFoundError:
        return "etude, not installed"
