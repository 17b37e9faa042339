"""What a step, an attempt and a solved attempt take: processors, GPUs, tokens, bytes; and what that is in money.

Processes know nothing of runs: what they take is divided by what the chosen runs did. With one run at a time that is its own.
"""

from __future__ import annotations

from infra.grafana.panels import SERVICES, Dashboard, Field, Row, panel

RUN = '{run=~"$run"}'
SHOWN, HOUR = "$__range", "1h"
HOURS_PER_MONTH = 730  # a twelfth of a year

FIELDS = (
    Field("core_hour", "A core for an hour", "0.05", "In your currency. The figure is an example: put your own."),
    Field("gpu_hour", "A GPU for an hour", "2", "In your currency. The figure is an example: put your own."),
    Field("gb_month", "A GB for a month", "0.02", "In your currency. The figure is an example: put your own."),
    Field("trainer_gpus", "GPUs per trainer", "0", "Reserved GPUs cost while the trainer answers, busy or not."),
    Field("engine_gpus", "GPUs per engine", "0", "Reserved GPUs cost while an engine answers, busy or not."),
)


def per(what: str, count: str) -> str:
    """Nothing while there is nothing to divide by, instead of infinity."""
    return f"{what} / ({count} > 0)"


def steps(window: str) -> str:
    return f"sum(increase(etude_trainer_steps_total{RUN}[{window}]))"


def attempts(window: str) -> str:
    return f"sum(increase(etude_reward_attempts_total{RUN}[{window}]))"


def solved(window: str) -> str:
    return f'sum(increase(etude_reward_attempts_total{{run=~"$run",outcome="solved"}}[{window}]))'


def processor(window: str, jobs: str = SERVICES) -> str:
    """Processor seconds."""
    return f'sum(increase(process_cpu_seconds_total{{job=~"{jobs}"}}[{window}]))'


def minutes(series: str, window: str) -> str:
    """The sum of a series over the minutes of the window; 0 where there is none."""
    return f"(sum_over_time(sum({series})[{window}:1m]) or vector(0))"


def processors_cost(window: str) -> str:
    return f"{processor(window)} / 3600 * $core_hour"


def gpus_cost(window: str) -> str:
    trainers, engines = minutes('up{job="trainer"}', window), minutes('up{job="inference"}', window)
    return f"({trainers} * $trainer_gpus + {engines} * $engine_gpus) / 60 * $gpu_hour"


def objects_cost(window: str) -> str:
    stored = minutes(f"etude_scheduler_run_objects_bytes{RUN}", window)
    return f"{stored} / 60 / 1e9 * $gb_month / {HOURS_PER_MONTH}"


def cost(window: str) -> str:
    return f"({processors_cost(window)} + {gpus_cost(window)} + {objects_cost(window)})"


def tokens(window: str) -> tuple[tuple[str, str], ...]:
    def trained(kind: str) -> str:
        return f'sum(increase(etude_trainer_tokens_total{{run=~"$run",kind="{kind}"}}[{window}]))'

    return (
        (per(f"sum(increase(sglang:generation_tokens_total[{window}]))", steps(window)), "sampled by engines"),
        (per(trained("fed"), steps(window)), "through the trainer"),
        (per(trained("sampled"), steps(window)), "trained"),
    )


def seconds(window: str) -> tuple[tuple[str, str], ...]:
    """Of a solved attempt."""
    trainer = f'sum(increase(etude_trainer_phase_seconds_sum{{run=~"$run",phase="step"}}[{window}]))'
    graders = f"sum(increase(etude_grader_busy_seconds_total[{window}]))"
    visible = f"sum(increase(etude_rollout_sandbox_wait_seconds_total[{window}]))"
    return (
        (per(processor(window, "inference"), solved(window)), "engines, processor"),
        (per(trainer, solved(window)), "trainer, steps"),
        (per(graders, solved(window)), "graders, busy"),
        (per(visible, solved(window)), "visible tests, waited for"),
    )


def processor_seconds(window: str) -> tuple[tuple[str, str], ...]:
    return (
        (per(processor(window), steps(window)), "a step"),
        (per(processor(window), attempts(window)), "an attempt"),
        (per(processor(window), solved(window)), "a solved attempt"),
    )


COST = Dashboard(
    uid="etude-cost",
    title="Étude: cost",
    about="What a step, an attempt and a solved attempt take. Money follows the prices at the top.",
    runs="etude_trainer_steps_total",
    fields=FIELDS,
    rows=(
        Row(
            "In the time shown",
            (
                panel(
                    "Money",
                    "Cores in use, not those that are reserved and idle; GPUs while their trainer or engine answers; objects of "
                    "the runs for as long as they were there. Servers (Kafka, PostgreSQL, …) and sandboxes are not in it.",
                    (processors_cost(SHOWN), "processors"),
                    (gpus_cost(SHOWN), "GPUs"),
                    (objects_cost(SHOWN), "objects"),
                    kind="stat",
                    total=True,
                ),
                panel(
                    "Money for",
                    "All of it, by what was got for it. Attempts of evaluations count as attempts.",
                    (per(cost(SHOWN), steps(SHOWN)), "a step"),
                    (per(cost(SHOWN), attempts(SHOWN)), "an attempt"),
                    (per(cost(SHOWN), solved(SHOWN)), "a solved attempt"),
                    kind="stat",
                    total=True,
                ),
                panel(
                    "Processor seconds for",
                    "Of all services together, without the children that sandboxes are.",
                    *processor_seconds(SHOWN),
                    unit="s",
                    kind="stat",
                    total=True,
                ),
                panel(
                    "Seconds for a solved attempt",
                    "The engines' processors, the trainer's steps, the graders at work, and attempts that waited for visible "
                    "tests. Seconds of different things: compare each with itself.",
                    *seconds(SHOWN),
                    unit="s",
                    kind="stat",
                    total=True,
                ),
                panel(
                    "Tokens for a step",
                    "Sampled by engines, lost and evaluated ones included; through the trainer's model; and with loss. Far more "
                    "sampled than trained: attempts are lost, or an evaluation is under way.",
                    *tokens(SHOWN),
                    kind="stat",
                    total=True,
                ),
                panel(
                    "Bytes stored for an attempt",
                    "What the runs take now, by kind, over the attempts of the time shown: choose a time that holds the whole "
                    "run. Counted every ETUDE_SWEEP_EVERY_S.",
                    (
                        f"sum by (kind) (etude_scheduler_run_objects_bytes{RUN}) / scalar({attempts(SHOWN)} > 0)",
                        "{{kind}}",
                    ),
                    unit="bytes",
                    kind="stat",
                    total=True,
                ),
            ),
        ),
        Row(
            "As it goes",
            (
                panel(
                    "Money for an hour",
                    "At the pace of the last hour.",
                    (processors_cost(HOUR), "processors"),
                    (gpus_cost(HOUR), "GPUs"),
                    (objects_cost(HOUR), "objects"),
                    stacked=True,
                    least=0,
                ),
                panel(
                    "Processor seconds by service",
                    "Per hour. 3600 are a core. On a CPU the engine and the trainer are the cost; another service that takes as "
                    "much is in trouble.",
                    (f'sum by (job) (increase(process_cpu_seconds_total{{job=~"{SERVICES}"}}[{HOUR}]))', "{{job}}"),
                    unit="s",
                    stacked=True,
                    least=0,
                ),
                panel(
                    "Memory by service",
                    "Resident, of all replicas together. Far below what is reserved for them: reserve less.",
                    (f'sum by (job) (process_resident_memory_bytes{{job=~"{SERVICES}"}})', "{{job}}"),
                    unit="bytes",
                    stacked=True,
                    least=0,
                ),
                panel(
                    "Processor seconds for one",
                    "Over the last hour. A solved attempt that gets cheaper is what a run is for.",
                    *processor_seconds(HOUR),
                    unit="s",
                    least=0,
                ),
                panel(
                    "Seconds for a solved attempt, over an hour",
                    "As above: engines' processors, trainer's steps, graders at work, visible tests waited for.",
                    *seconds(HOUR),
                    unit="s",
                    least=0,
                ),
                panel("Tokens for a step, over an hour", "As above.", *tokens(HOUR), least=0),
            ),
        ),
    ),
)
