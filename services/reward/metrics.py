"""What the reward service counts. Series about attempts carry the run."""

from prometheus_client import Counter, Gauge, Histogram

SCORED = Counter("etude_reward_attempts_total", "Finished attempts, by outcome.", ["run", "outcome"])
REWARD = Counter("etude_reward_terms_total", "Sum of the terms' absolute values, by term.", ["run", "term"])
JOBS = Counter("etude_reward_jobs_total", "Grading jobs sent.")
IN_HAND = Gauge("etude_reward_in_hand_attempts", "Finished attempts whose score is not out yet.")
SECONDS = Histogram(
    "etude_reward_grading_seconds",
    "From taking a finished attempt to its published score.",
    buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
