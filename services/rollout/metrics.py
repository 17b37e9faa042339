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
SAMPLED = Counter(
    "etude_rollout_sampled_tokens_total",
    "Tokens that engines said they sampled and that attempts took: ahead of finished attempts' tokens by those in hand.",
    ["run"],
)
UNRECORDED = Counter(
    "etude_rollout_unrecorded_tokens_total",
    "Tokens that were sampled and are in no trajectory, by why; what nobody could tell of is counted by none.",
    ["run", "why"],
)
CHECKPOINTS = Counter("etude_rollout_checkpoints_total", "Rollout checkpoints written.", ["run"])
RESUMED = Counter(
    "etude_rollout_resumed_total", "Attempts given again that had a checkpoint, by what became of it.", ["run", "how"]
)
ENDPOINT_REQUESTS = Counter(
    "etude_rollout_endpoint_requests_total",
    "Answers to agents of others, by where their prompt goes on.",
    ["run", "branch"],
)
ENDPOINT_TOKENS = Counter(
    "etude_rollout_endpoint_prompt_tokens_total",
    "Prompt tokens of agents of others: appended, or rewritten in place of recorded ones.",
    ["run", "kind"],
)
ENDPOINT_REFUSED = Counter(
    "etude_rollout_endpoint_refused_total",
    "Requests of agents of others that were refused, by HTTP status.",
    ["status"],
)
