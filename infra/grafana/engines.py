"""How fast the policy samples, and what a new version costs."""

from __future__ import annotations

from infra.grafana.panels import Dashboard, Row, panel, quantile, rate

ENGINES = Dashboard(
    uid="etude-engines",
    title="Étude: engines",
    about="Sampling and swaps. Names that begin with sglang: are SGLang's own, so that its engines show here, too.",
    rows=(
        Row(
            "Sampling",
            (
                panel(
                    "Tokens",
                    "Per second: sampled, in prompts, and of these taken from the cache.",
                    (rate("sglang:generation_tokens_total"), "sampled"),
                    (rate("sglang:prompt_tokens_total"), "prompt"),
                    (rate("sglang:cached_tokens_total"), "from the cache"),
                    unit="cps",
                ),
                panel(
                    "Tokens per replica",
                    "Sampled, per second.",
                    (rate("sglang:generation_tokens_total", "instance"), "{{instance}}"),
                    unit="cps",
                ),
                panel(
                    "Requests",
                    "Computed now, and waiting for a row. A queue that stays: more replicas, or fewer attempts in hand.",
                    ("sum (sglang:num_running_reqs)", "running"),
                    ("sum (sglang:num_queue_reqs)", "waiting"),
                ),
                panel(
                    "Latency",
                    "From a request's arrival to its answer.",
                    (quantile(0.5, "sglang:e2e_request_latency_seconds"), "median"),
                    (quantile(0.95, "sglang:e2e_request_latency_seconds"), "95 %"),
                    (quantile(0.99, "sglang:e2e_request_latency_seconds"), "99 %"),
                    unit="s",
                ),
                panel(
                    "First token",
                    "From a request's arrival to its first token: how long it queued, and its prompt.",
                    (quantile(0.5, "sglang:time_to_first_token_seconds"), "median"),
                    (quantile(0.95, "sglang:time_to_first_token_seconds"), "95 %"),
                    unit="s",
                ),
                panel(
                    "Between tokens",
                    "From a token to the next, the mean of each request.",
                    (quantile(0.5, "sglang:inter_token_latency_seconds"), "median"),
                    (quantile(0.95, "sglang:inter_token_latency_seconds"), "95 %"),
                    unit="s",
                ),
                panel(
                    "Cache",
                    "Share of its positions that running requests hold. What is kept for their next turn makes room for others.",
                    ("sglang:token_usage", "{{instance}}"),
                    unit="percentunit",
                    least=0,
                    most=1,
                ),
                panel(
                    "How requests end",
                    "Per second, by type.",
                    (rate("etude_inference_requests_total", "finish"), "{{finish}}"),
                    unit="cps",
                    stacked=True,
                ),
                panel(
                    "Batch",
                    "Sampled tokens per forward pass: the work that one pass is shared by.",
                    (f"{rate('sglang:generation_tokens_total')} / {rate('etude_inference_steps_total')}", "tokens"),
                ),
                panel(
                    "Speculation",
                    "Tokens per second that the MTP layer proposed, and those that the trunk accepted; 0 where it does not pay.",
                    (rate("etude_inference_drafted_tokens_total"), "proposed"),
                    (rate("etude_inference_accepted_tokens_total"), "accepted"),
                    least=0,
                ),
                panel(
                    "Tokens per judged draft",
                    "What a pass that judges drafts gives, its own token included; 0 where none does.",
                    ("sglang:spec_accept_length", "{{instance}}"),
                    least=0,
                ),
                panel(
                    "Throughput by the engine's own clock",
                    "Tokens per second.",
                    ("sglang:gen_throughput", "{{instance}}"),
                ),
                panel(
                    "Asked for again",
                    "Generations that an engine lost, per second.",
                    (rate("etude_rollout_engine_retries_total"), "retries"),
                    least=0,
                ),
            ),
        ),
        Row(
            "Versions",
            (
                panel(
                    "Version",
                    "Which version each replica samples with, and the one published last.",
                    ("etude_inference_serial", "{{instance}} {{pool}}"),
                    ("max (etude_trainer_serial)", "published"),
                ),
                panel(
                    "Pause of a swap",
                    "Sampling stood still.",
                    (quantile(0.5, "etude_inference_swap_pause_seconds"), "median"),
                    (quantile(0.99, "etude_inference_swap_pause_seconds"), "99 %"),
                    unit="s",
                ),
                panel(
                    "Before a swap",
                    "Median: fetch, rebuild and verify while sampling goes on; then the wait for the end of a step.",
                    (quantile(0.5, "etude_inference_swap_prepare_seconds"), "prepare"),
                    (quantile(0.5, "etude_inference_swap_wait_seconds"), "wait"),
                    unit="s",
                ),
                panel(
                    "Swaps",
                    "Versions applied, and attempts that failed, per hour.",
                    ("sum by (instance) (increase(etude_inference_swaps_total[1h]))", "applied {{instance}}"),
                    ("sum (increase(etude_inference_swap_failures_total[1h]))", "failed"),
                ),
            ),
        ),
        Row(
            "SGLang",
            (
                panel(
                    "Up",
                    "1 while it answers with weights that were checked.",
                    ("etude_inference_sglang_up", "{{instance}}"),
                    least=0,
                    most=1,
                ),
                panel(
                    "Started again, and undone",
                    "Per hour: starts after an end, a failure or silence; loads after which what served before was loaded.",
                    ("sum by (instance) (increase(etude_inference_sglang_restarts_total[1h]))", "started {{instance}}"),
                    ("sum (increase(etude_inference_sglang_undone_total[1h]))", "undone"),
                    least=0,
                ),
                panel(
                    "How its requests end",
                    "Per second, by type; retracted: computed again for want of room.",
                    (rate("etude_inference_sglang_requests_total", "finish"), "{{finish}}"),
                    (rate("etude_inference_sglang_retracted_total"), "retracted"),
                    unit="cps",
                ),
            ),
        ),
    ),
)
