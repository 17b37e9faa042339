"""Metrics of the weight agent, whatever the engine."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

SERIAL = Gauge("etude_inference_serial", "Version that samples now.", ["pool"])
SWAPS = Counter("etude_inference_swaps", "Versions applied.")
SWAP_FAILURES = Counter("etude_inference_swap_failures", "Attempts to rebuild or verify a version that failed.")
SWAP_PAUSE = Histogram(
    "etude_inference_swap_pause_seconds",
    "Sampling stood still for a swap.",
    buckets=(1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)
SWAP_PREPARE = Histogram(
    "etude_inference_swap_prepare_seconds",
    "Fetch, rebuild and verify, while sampling goes on.",
    buckets=(0.03, 0.1, 0.3, 1, 3, 10, 30),
)
