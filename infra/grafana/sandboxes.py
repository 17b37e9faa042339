"""Where candidate code runs and is judged."""

from __future__ import annotations

from infra.grafana.panels import Dashboard, Row, panel, quantile, rate

RUN = '{run=~"$run"}'

SANDBOXES = Dashboard(
    uid="etude-sandboxes",
    title="Étude: sandboxes and graders",
    about="Where candidate code runs and is judged.",
    runs="etude_reward_attempts_total",
    rows=(
        Row(
            "Grading",
            (
                panel(
                    "Graded",
                    "Attempts per second, by outcome. `failed` is infrastructure, never the agent.",
                    (rate("etude_grader_attempts_total", "outcome"), "{{outcome}}"),
                    unit="cps",
                    stacked=True,
                ),
                panel(
                    "Busy graders",
                    "Graders at work at a time, and graders there are. Near each other for long: start more.",
                    (rate("etude_grader_busy_seconds_total"), "busy"),
                    ('sum (up{job="grader"})', "there are"),
                    least=0,
                ),
                panel(
                    "Terms without an answer",
                    "Attempts per second for which a behaviour term was quarantined, by term. The verdict says why.",
                    (rate("etude_grader_terms_quarantined_total", "term"), "{{term}}"),
                    unit="cps",
                    stacked=True,
                ),
                panel(
                    "From finished to scored",
                    "Taking a finished attempt to its published score. Points are single attempts, with the id of their trace.",
                    (quantile(0.5, "etude_reward_grading_seconds"), "median"),
                    (quantile(0.95, "etude_reward_grading_seconds"), "95 %"),
                    unit="s",
                    exemplars=True,
                ),
                panel(
                    "In hand",
                    "Finished attempts whose score is not out yet.",
                    ("sum (etude_reward_in_hand_attempts)", "attempts"),
                ),
                panel("Jobs", "Grading jobs sent, per second.", (rate("etude_reward_jobs_total"), "jobs"), unit="cps"),
                panel(
                    "Outcomes",
                    "Scored attempts per second, by outcome.",
                    (f"sum by (outcome) (rate(etude_reward_attempts_total{RUN}[$__rate_interval]))", "{{outcome}}"),
                    unit="cps",
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Visible tests and the gate",
            (
                panel(
                    "Visible test runs",
                    "Per second, by where the answer came from.",
                    (rate("etude_rollout_sandbox_runs_total", "source"), "{{source}}"),
                    unit="cps",
                ),
                panel(
                    "Wait for visible tests",
                    "Attempts that wait at a time.",
                    (rate("etude_rollout_sandbox_wait_seconds_total"), "attempts"),
                ),
                panel(
                    "Problems at the gate",
                    "Since the curator started, by outcome.",
                    (f"sum by (outcome) (etude_curator_problems_total{RUN})", "{{outcome}}"),
                ),
                panel(
                    "Processor of the workers",
                    "Cores of the workers themselves; what runs in their sandboxes is a process of its own and not in it.",
                    (
                        'sum by (job) (rate(process_cpu_seconds_total{job=~"grader|rollout|curator"}[$__rate_interval]))',
                        "{{job}}",
                    ),
                ),
            ),
        ),
    ),
)
