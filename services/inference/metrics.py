"""The embedded engine's metrics: SGLang's names where it has one, so that its dashboards read this engine too, and our own."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

PROMPT_TOKENS = Counter("sglang:prompt_tokens", "Prompt tokens of admitted requests, cached ones included.")
GENERATED_TOKENS = Counter("sglang:generation_tokens", "Sampled tokens.")
CACHED_TOKENS = Counter("sglang:cached_tokens", "Prompt tokens taken from the cache.")
RUNNING = Gauge("sglang:num_running_reqs", "Requests that are being computed.")
WAITING = Gauge("sglang:num_queue_reqs", "Requests that wait for a row.")
TOKEN_USAGE = Gauge(
    "sglang:token_usage",
    "Share of the cache's positions that running requests hold; what is only kept for their next turn is left out.",
)
THROUGHPUT = Gauge("sglang:gen_throughput", "Sampled tokens per second since the last scrape.")
LATENCY = Histogram(
    "sglang:e2e_request_latency_seconds",
    "From arrival to answer.",
    buckets=(0.01, 0.03, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 15, 60),
)
FIRST_TOKEN = Histogram(
    "sglang:time_to_first_token_seconds",
    "From arrival to the first sampled token.",
    buckets=(0.003, 0.01, 0.03, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 15, 60),
)
BETWEEN_TOKENS = Histogram(
    "sglang:inter_token_latency_seconds",
    "From one sampled token to the next; one observation a request, its mean.",
    buckets=(0.0003, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1, 2),
)
ACCEPT_LENGTH = Gauge(
    "sglang:spec_accept_length",
    "Tokens per pass that judged drafts, since the last scrape; 0: there was none.",
)
DRAFTED = Counter(
    "etude_inference_drafted_tokens", "Tokens that the MTP layer proposed, by place behind the newest.", ["place"]
)
ACCEPTED = Counter("etude_inference_accepted_tokens", "Proposed tokens that the trunk accepted, by place.", ["place"])
for _counter in (DRAFTED, ACCEPTED):
    _counter.labels(1)  # 0 from the start, so that a panel shows it
STEPS = Counter("etude_inference_steps", "Forward passes.")
FINISHED = Counter("etude_inference_requests", "Requests that ended, by the type of their end.", ["finish"])
SWAP_WAIT = Histogram(
    "etude_inference_swap_wait_seconds",
    "From a ready version to the end of the step in hand.",
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1),
)


def total(counter: Counter, **labels: str) -> float:
    """A counter's value, read as a scrape reads it: the sum over all of its series that have these labels."""
    return sum(
        sample.value
        for sample in counter.collect()[0].samples
        if sample.name.endswith("_total") and labels.items() <= sample.labels.items()
    )
