"""Prometheus metrics of the trainer. All carry the run."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from services.trainer.shares import PHASES
from shared.contracts.messages import StepCommitted

STEPS = Counter("etude_trainer_steps_total", "Steps committed.", ["run"])
GROUPS = Counter("etude_trainer_groups_total", "Groups trained.", ["run"])
TOKENS = Counter(
    "etude_trainer_tokens_total", "Tokens through the model (fed) and with loss (sampled).", ["run", "kind"]
)
REPEATED = Counter("etude_trainer_groups_repeated_total", "Announcements of groups that were known already.", ["run"])
QUARANTINED = Counter("etude_trainer_groups_quarantined_total", "Groups that could not be trained.", ["run"])
SKIPPED = Counter(
    "etude_trainer_steps_skipped_total", "Steps whose gradient was not finite or a spike.", ["run", "reason"]
)
SERIAL = Gauge("etude_trainer_serial", "Version last published.", ["run"])
INCARNATION = Gauge("etude_trainer_incarnation", "Incarnation of this process.", ["run"])
IN_HAND = Gauge("etude_trainer_groups_in_hand", "Groups fetched and waiting for their step.", ["run"])
FIGURE = Gauge(
    "etude_trainer_step_figure",
    "Figures of the last step, by name (steps.committed carries them all).",
    ["run", "name"],
)
AGE = Gauge("etude_trainer_age_steps", "Greatest age of a sample in the last step.", ["run"])
SECONDS = Histogram(
    "etude_trainer_phase_seconds", "Seconds of a step by phase.", ["run", "phase"],
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)  # fmt: skip
TIME = Counter(
    "etude_trainer_time_seconds_total",
    "Where the trainer's time goes. Every moment belongs to one phase, so their shares add up to 100 %.",
    ["run", "phase"],
)
FIGURES = (
    "reward_mean", "reward_best_mean", "solved_share", "solved_gain", "signal_share", "loss", "entropy", "grad_norm", "mtp_loss",
    "length_mean", "mismatch_k3", "mismatch_log_ratio_p50", "mismatch_log_ratio_p99", "mismatch_log_ratio_max",
    "mismatch_unreplayed_log_ratio_p99", "importance_clipped_share", "replay_replaced_share", "prefix_saved_share",
    "prefix_lost_share", "share_waiting", "share_packing", "share_computing", "share_publishing", "share_checkpointing",
)  # fmt: skip


def begin(run: str, incarnation: int, serial: int) -> None:
    """Counters of rare things begin at 0: one that is born with its first event shows no increase."""
    INCARNATION.labels(run).set(incarnation)
    SERIAL.labels(run).set(serial)
    for counter in (REPEATED, QUARANTINED):
        counter.labels(run)
    for reason in ("not_finite", "spike"):
        SKIPPED.labels(run, reason)
    for phase in PHASES:
        TIME.labels(run, phase)


def forget(run: str) -> None:
    """What this process knew of the state of a run that it has left: nobody would ever change it again, and alerts would
    go on comparing with it. Counters stay."""
    for gauge in (SERIAL, INCARNATION, IN_HAND, FIGURE, AGE):
        gauge.remove_by_labels({"run": run})


def note_time(run: str, seconds: dict[str, float]) -> None:
    """Count the seconds of each phase (see `shares`)."""
    for phase, spent in seconds.items():
        TIME.labels(run, phase).inc(spent)


def note_step(message: StepCommitted) -> None:
    run, figures = message.run, message.metrics
    STEPS.labels(run).inc()
    GROUPS.labels(run).inc(len(message.groups))
    SERIAL.labels(run).set(message.serial)
    AGE.labels(run).set(max(message.groups.values(), default=0))
    for kind in ("fed", "sampled"):
        TOKENS.labels(run, kind).inc(figures.get(f"tokens_{kind}", 0.0))
    for name in FIGURES:
        if name in figures:
            FIGURE.labels(run, name).set(figures[name])
    for name, value in figures.items():
        if name.startswith("seconds_"):
            SECONDS.labels(run, name.removeprefix("seconds_")).observe(value)
