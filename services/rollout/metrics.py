"""What the rollout service counts. Every series carries the run."""

from prometheus_client import Counter, Gauge

ATTEMPTS = Counter("etude_rollout_attempts_total", "Attempts that ended, by reason.", ["run", "stop"])
TOKENS = Counter("etude_rollout_tokens_total", "Tokens of finished attempts, by kind.", ["run", "kind"])
RUNNING = Gauge("etude_rollout_running_attempts", "Attempts in hand.", ["run"])
ENGINE_SECONDS = Counter(
    "etude_rollout_engine_wait_seconds_total", "Attempts' time spent waiting on the engine.", ["run"]
)
ENGINE_RETRIES = Counter("etude_rollout_engine_retries_total", "Generations asked for again.", ["run"])
SANDBOX_SECONDS = Counter("etude_rollout_sandbox_wait_seconds_total", "Attempts' time spent waiting on visible tests.")
SANDBOX_RUNS = Counter(
    "etude_rollout_sandbox_runs_total", "Visible test runs, by where the answer came from.", ["source"]
)
