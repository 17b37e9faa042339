"""Who waits on whom, and where work piles up."""

from __future__ import annotations

from infra.grafana.panels import Dashboard, Row, panel, quantile, rate

RUN = '{run=~"$run"}'

FLOW = Dashboard(
    uid="etude-flow",
    title="Étude: flow",
    about="From a problem to a step: who waits on whom, and where work piles up.",
    runs="etude_scheduler_attempts",
    rows=(
        Row(
            "Now",
            (
                panel(
                    "Services that answer",
                    "Replicas whose metrics can be read, by service.",
                    ("sum by (job) (up)", "{{job}}"),
                    kind="stat",
                ),
                panel(
                    "Who waits on what",
                    "Seconds. Waiting is how the platform paces itself; one that grows without end names the culprit.",
                    ("time() - etude_health_waiting_since_seconds", "{{job}} → {{on}}"),
                    unit="s",
                    kind="table",
                    width=16,
                ),
            ),
        ),
        Row(
            "Attempts and groups",
            (
                panel(
                    "Groups",
                    "Open: under way. Waiting: complete, their step has not come. Trained.",
                    (f"sum by (state) (etude_scheduler_groups{RUN})", "{{state}}"),
                ),
                panel(
                    "Gate",
                    "What the scheduler admits groups by: version and oldest in steps; accepted, running, held (complete, without "
                    "a place yet), lead (how many may be asked for ahead of the trainer) and room in groups. Room 0: it waits "
                    "for a version. Held above 0 while the trainer waits: an attempt lasts about as long as the bound allows.",
                    (f"max by (number) (etude_scheduler_gate{RUN})", "{{number}}"),
                ),
                panel(
                    "Shares of the slots",
                    "Several runs at once: the part of the workers' slots that each is to have, and what it used in the last "
                    "minutes. Below its share: it could ask for no more, or its attempts are short and the queue is long.",
                    ('max by (run) (etude_scheduler_slots{run=~"$run",number="share"})', "{{run}} share"),
                    ('max by (run) (etude_scheduler_slots{run=~"$run",number="used"})', "{{run}} used"),
                    unit="percentunit",
                ),
                panel(
                    "Attempts under way",
                    "By the ledger, and by the workers that have them in hand.",
                    (f"sum (etude_scheduler_attempts{RUN})", "ledger"),
                    (f"sum (etude_rollout_running_attempts{RUN})", "in hand"),
                ),
                panel(
                    "Attempts that ended",
                    "Per second, by reason.",
                    (f"sum by (stop) (rate(etude_rollout_attempts_total{RUN}[$__rate_interval]))", "{{stop}}"),
                    unit="cps",
                    stacked=True,
                ),
                panel(
                    "What attempts wait for",
                    "Attempts that wait at a time: for the engine's tokens, for visible tests.",
                    (f"sum (rate(etude_rollout_engine_wait_seconds_total{RUN}[$__rate_interval]))", "engine"),
                    ("sum (rate(etude_rollout_sandbox_wait_seconds_total[$__rate_interval]))", "sandbox"),
                ),
                panel(
                    "Age of what is trained",
                    "Greatest age of a sample in the last step, in steps.",
                    (f"max by (run) (etude_trainer_age_steps{RUN})", "{{run}}"),
                    least=0,
                ),
                panel(
                    "Tokens of attempts",
                    "Of finished attempts, per second, by kind.",
                    (f"sum by (kind) (rate(etude_rollout_tokens_total{RUN}[$__rate_interval]))", "{{kind}}"),
                    unit="cps",
                    stacked=True,
                ),
                panel(
                    "Sampled, and in no trajectory",
                    "Tokens per second: what engines said they sampled, and what of it is lost, by why.",
                    (f"sum (rate(etude_rollout_sampled_tokens_total{RUN}[$__rate_interval]))", "sampled"),
                    (
                        f"sum by (why) (rate(etude_rollout_unrecorded_tokens_total{RUN}[$__rate_interval]))",
                        "lost, {{why}}",
                    ),
                    unit="cps",
                ),
                panel(
                    "Attempts that change hands",
                    "Rollout checkpoints written, and attempts given again that had one, by what became of it; per hour.",
                    (f"sum (increase(etude_rollout_checkpoints_total{RUN}[1h]))", "checkpoints, 1 h"),
                    (f"sum by (how) (increase(etude_rollout_resumed_total{RUN}[1h]))", "given again, {{how}}, 1 h"),
                ),
                panel(
                    "Agents of others",
                    "Answers per second, by where their prompt goes on; tokens of prompts, and requests refused by status.",
                    (
                        f"sum by (branch) (rate(etude_rollout_endpoint_requests_total{RUN}[$__rate_interval]))",
                        "answers, {{branch}}",
                    ),
                    (
                        f"sum by (kind) (rate(etude_rollout_endpoint_prompt_tokens_total{RUN}[$__rate_interval]))",
                        "tokens, {{kind}}",
                    ),
                    (
                        "sum by (status) (rate(etude_rollout_endpoint_refused_total[$__rate_interval]))",
                        "refused, {{status}}",
                    ),
                    unit="cps",
                ),
                panel(
                    "Trainer's hand",
                    "Groups fetched and waiting for their step; known already, quarantined and skipped steps, per hour.",
                    (f"sum (etude_trainer_groups_in_hand{RUN})", "in hand"),
                    (f"sum (increase(etude_trainer_groups_repeated_total{RUN}[1h]))", "known already, 1 h"),
                    (f"sum (increase(etude_trainer_groups_quarantined_total{RUN}[1h]))", "quarantined, 1 h"),
                    (
                        f"sum by (reason) (increase(etude_trainer_steps_skipped_total{RUN}[1h]))",
                        "steps skipped, {{reason}}, 1 h",
                    ),
                ),
            ),
        ),
        Row(
            "Messages",
            (
                panel(
                    "Lag",
                    "Messages that a group has not acknowledged, as the console found it. Empty where no console runs.",
                    ("max by (group, topic) (etude_bus_lag_messages)", "{{group}} {{topic}}"),
                    least=0,
                ),
                panel(
                    "Age when taken",
                    "95th percentile of the time from publication to the moment when a consumer of the group took it.",
                    (quantile(0.95, "etude_bus_delivery_age_seconds", "topic", "group"), "{{group}} {{topic}}"),
                    unit="s",
                ),
                panel(
                    "In flight",
                    "Deliveries that consumers of a group have taken and not answered yet.",
                    ("sum by (group) (etude_bus_in_flight)", "{{group}}"),
                    least=0,
                ),
                panel(
                    "Longest unanswered",
                    "Since when the delivery that waits longest for its answer was taken.",
                    ("max by (group) (etude_bus_oldest_unanswered_seconds)", "{{group}}"),
                    unit="s",
                ),
                panel(
                    "Deliveries",
                    "Per second, by topic.",
                    (rate("etude_bus_deliveries_total", "topic"), "{{topic}}"),
                    unit="cps",
                ),
                panel(
                    "Retried and buried",
                    "Per hour. Buried: on the dead-letter topic, with the reason.",
                    (
                        'sum by (topic, answer) (increase(etude_bus_deliveries_total{answer!="done"}[1h]))',
                        "{{answer}} {{topic}}",
                    ),
                    least=0,
                ),
                panel(
                    "Scheduler's messages",
                    "Per second, by topic and outcome.",
                    (rate("etude_scheduler_messages_total", "topic", "outcome"), "{{topic}} {{outcome}}"),
                    unit="cps",
                ),
                panel(
                    "Scheduler's batches",
                    "Handling one, its transaction included; and committed messages that wait for the bus.",
                    (quantile(0.5, "etude_scheduler_batch_seconds"), "median"),
                    (quantile(0.99, "etude_scheduler_batch_seconds"), "99 %"),
                    ("sum (etude_scheduler_outbox_messages)", "outbox"),
                    unit="s",
                ),
            ),
        ),
        Row(
            "Objects",
            (
                panel(
                    "What a run takes",
                    "By kind, when the scheduler last counted (ETUDE_SWEEP_EVERY_S). Trajectories grow as long as the run does, "
                    "weights too unless it keeps only so many versions.",
                    (f"sum by (kind) (etude_scheduler_run_objects_bytes{RUN})", "{{kind}}"),
                    unit="bytes",
                    stacked=True,
                ),
                panel(
                    "Against its quota",
                    "A run that takes more than its quota is paused. 0: it has none.",
                    (f"sum by (run) (etude_scheduler_run_objects_bytes{RUN})", "{{run}}"),
                    (f"max by (run) (etude_scheduler_run_quota_bytes{RUN})", "quota of {{run}}"),
                    unit="bytes",
                    least=0,
                ),
                panel(
                    "Deleted",
                    "Per hour, by kind: what was given up, trained routing, weights of older versions. None of it for hours while "
                    "a run practises: the scheduler's log says what it is refused.",
                    (f"sum by (kind) (increase(etude_scheduler_deleted_bytes_total{RUN}[1h]))", "{{kind}}"),
                    unit="bytes",
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Processes",
            (
                panel(
                    "Spans",
                    "What became of OpenTelemetry spans; lost and dropped ones mean that the collector is away or too slow. Empty "
                    "where traces are off.",
                    (rate("etude_traces_spans_total", "outcome"), "{{outcome}}"),
                    least=0,
                ),
                panel(
                    "Processor",
                    "Cores in use, by service.",
                    ("sum by (job) (rate(process_cpu_seconds_total[$__rate_interval]))", "{{job}}"),
                    stacked=True,
                ),
                panel(
                    "Memory",
                    "Resident, by service. The sandboxes' own is not in it.",
                    ("sum by (job) (process_resident_memory_bytes)", "{{job}}"),
                    unit="bytes",
                    stacked=True,
                ),
                panel(
                    "Leader",
                    "Exactly one scheduler leads.",
                    ("sum (etude_scheduler_leader)", "leaders"),
                    least=0,
                ),
            ),
        ),
    ),
)
