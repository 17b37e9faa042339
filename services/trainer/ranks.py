"""The ranks of one trainer. Rank 0 is the service and leads; the others do what it calls, in the same order.

One incarnation, one reader of the bus, one writer to the object store: rank 0. What needs all ranks (building the engine, a step,
collecting or loading the state) is a method of `Rank`, which `Ranks.call` runs on every rank at once. With one process it is a
plain call.

A rank that fails ends, and with it the others: their next collective fails. The launcher starts all of them again, and the run
goes on from its last checkpoint, as after the death of a single trainer. Before the ranks build an engine together, each tells
the others whether it has what it needs: a rank that failed alone would leave them waiting in the first collective.
"""

from __future__ import annotations

import datetime
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.config import Arithmetic
from services.trainer.engine import Engine, start_distributed
from services.trainer.masters import load_published
from services.trainer.packing import TrainSequence
from services.trainer.step import Trained, Trainer
from shared.contracts.run import RunConfig
from shared.model import Transformer, load_checkpoint
from shared.objects import Objects
from shared.weights import Tensors
from shared.weights.checkpoint_objects import download_directory

END = "end"
PATIENCE = datetime.timedelta(days=365)  # for the leader's next call: a paused run may wait for days
END_PATIENCE_S = 60.0  # for ranks to take the word that it is over; one that does not is stopped by the launcher
log = structlog.get_logger()


class RankFailed(RuntimeError):
    """Another rank could not do its part. The text names the rank and quotes its error."""


@dataclass(frozen=True, slots=True)
class Options:
    """How this trainer computes; every rank has the same. `context_ranks`: ranks that share a sequence. `expert_ranks`: ranks that
    divide the experts. `recompute`: layers keep their inputs alone (activation checkpointing). `arithmetic`: of forward and
    backward. `mtp_stride`: the MTP layer learns from every n-th unit."""

    zero_stage: int = 0
    context_ranks: int = 1
    expert_ranks: int = 1
    recompute: bool = False
    arithmetic: Arithmetic = "float32"
    mtp_stride: int = 4


class Rank:
    """What one rank holds: its engine and trainer. `device`: cpu, cuda or cuda:N."""

    engine: Engine
    trainer: Trainer
    calls: Any = None  # the group over which the leader calls; None: there is one rank

    def __init__(self, objects: Objects, cache: Path, device: str = "cpu") -> None:
        self._objects, self._cache, self._device = objects, cache, device

    def open(self, config: RunConfig, published: Tensors | None, options: Options) -> None:
        """Build the policy of a run: its base, or the `published` tensors in its place; fresh moments. Raises what loading raises,
        on the rank where it failed, and RankFailed on the others."""
        train = msgspec.structs.replace(config.train, norm_tokens=config.normaliser)
        failure: Exception | None = None
        try:
            model, reference = self._read(config, published)
        except Exception as error:
            failure = error
        self._agree(failure)
        model.recomputes = options.recompute
        self.engine = Engine(
            model,
            train,
            zero_stage=options.zero_stage,
            context_ranks=options.context_ranks,
            expert_ranks=options.expert_ranks,
            arithmetic=getattr(torch, options.arithmetic),
        )
        if reference is not None:
            self.engine.experts.divide(reference)
        self.trainer = Trainer(self.engine, train, reference=reference, mtp_stride=options.mtp_stride)

    def _read(self, config: RunConfig, published: Tensors | None) -> tuple[Transformer, Transformer | None]:
        """Return the policy and, for a KL penalty, the reference. No rank waits for another here."""
        torch.manual_seed(config.seed)
        directory = download_directory(self._objects, config.base, self._cache / "base" / config.base.checksum)
        model = load_checkpoint(directory, dtype=torch.float32).to(self._device)
        if published is not None:
            load_published(model, published)
        reference = load_checkpoint(directory, dtype=torch.float32).to(self._device) if config.train.kl > 0 else None
        return model, reference

    def _agree(self, failure: Exception | None) -> None:
        """Wait until every rank has come this far, and raise if one of them failed: its own failure, or RankFailed."""
        said: list[str | None] = [None]
        if self.calls is not None:
            said *= dist.get_world_size()
            text = None if failure is None else f"{type(failure).__name__}: {failure}"
            dist.all_gather_object(said, text, group=self.calls)
        if failure is not None:
            raise failure
        for rank, text in enumerate(said):
            if text is not None:
                raise RankFailed(f"rank {rank}: {text}")

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.engine.load(state)

    def state(self, borrow: bool = False) -> dict[str, Tensor]:
        return self.engine.state(borrow=borrow)

    def published(self) -> dict[str, Tensor]:
        return self.engine.published()

    def train(
        self, batch: Sequence[TrainSequence], attempts: int, step: int, progress: float, measure_replay: bool
    ) -> Trained:
        return self.trainer.train(batch, attempts, step, progress=progress, measure_replay=measure_replay)

    def forget_norms(self) -> None:
        self.engine.forget_norms()


class Ranks:
    """All ranks, as the leader sees them. `own`: what the leader's rank holds."""

    def __init__(self, own: Rank) -> None:
        self.own = own
        self._calls = own.calls = _calls()
        self._failed = False

    def call(self, name: str, *arguments: Any) -> Any:
        """Run a method of `Rank` on every rank. Return what the leader's own returned."""
        try:
            self._tell(name, arguments)
            return getattr(self.own, name)(*arguments)
        except BaseException:
            self._failed = True
            raise

    def end(self) -> None:
        """Let the others leave. Nothing is called afterwards. After a call that failed nobody listens any more: the others end
        with this process, or have ended."""
        if self._failed or self._calls is None:
            return
        telling = threading.Thread(target=self._tell, args=(END, ()), daemon=True)
        telling.start()
        telling.join(END_PATIENCE_S)
        if telling.is_alive():
            log.warning("ranks_do_not_listen", waited_s=END_PATIENCE_S)

    def _tell(self, name: str, arguments: tuple[Any, ...]) -> None:
        if self._calls is not None:
            dist.broadcast_object_list([name, arguments], src=0, group=self._calls)


def follow(own: Rank) -> None:
    """Do what the leader calls until it says that it is over. Raises what a method raises, and an error of torch.distributed
    when the leader has died.

    The launcher tells every rank to stop at once. The leader still finishes its step, so only its word counts here."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    calls = own.calls = _calls()
    while True:
        received: list[Any] = [None, None]
        dist.broadcast_object_list(received, src=0, group=calls)
        name, arguments = received
        if name == END:
            return
        log.debug("called", method=name)
        getattr(own, name)(*arguments)


def _calls() -> Any:
    """Return the group over which the leader calls; None: there is one rank."""
    start_distributed()
    if dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=PATIENCE)
