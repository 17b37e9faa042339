"""Metrics of the SGLang engine beside SGLang's own, which are passed through."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

UP = Gauge("etude_inference_sglang_up", "1 while SGLang answers with weights that were checked.")
RESTARTS = Counter("etude_inference_sglang_restarts", "Times that SGLang ended, failed to start or fell silent.")
UNDONE = Counter("etude_inference_sglang_undone", "Loads that failed and were undone by loading what served before.")
RETRACTED = Counter(
    "etude_inference_sglang_retracted",
    "Requests whose cache SGLang gave up for want of room and computed again, their routing with it.",
)
REQUESTS = Counter("etude_inference_sglang_requests", "Requests that ended, by the type of their end.", ["finish"])
