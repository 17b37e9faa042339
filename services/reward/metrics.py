"""What the reward service counts. Series about attempts carry the run."""

from prometheus_client import Counter, Gauge, Histogram

from shared.contracts.tracing import trace_id

SCORED = Counter("etude_reward_attempts_total", "Finished attempts, by outcome.", ["run", "outcome"])
REWARD = Counter("etude_reward_terms_total", "Sum of the terms' absolute values, by term.", ["run", "term"])
JOBS = Counter("etude_reward_jobs_total", "Grading jobs sent.")
IN_HAND = Gauge("etude_reward_in_hand_attempts", "Finished attempts whose score is not out yet.")
SECONDS = Histogram(
    "etude_reward_grading_seconds",
    "From taking a finished attempt to its published score.",
    buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)


def note_graded(attempt: str, seconds: float) -> None:
    """With the attempt's trace as an exemplar: from a slow point on a curve to what it was."""
    SECONDS.observe(seconds, {"trace_id": trace_id(attempt)})
