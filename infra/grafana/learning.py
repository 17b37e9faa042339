"""Is it learning, and what is it learning?"""

from __future__ import annotations

from infra.grafana.panels import Dashboard, Panel, Row, panel, quantile, rate

RUN = '{run=~"$run"}'


def figure(title: str, about: str, *names: str, unit: str = "short", **options: object) -> Panel:
    """Figures of the trainer's last step, one curve each."""
    queries = [
        (f'max by (run) (etude_trainer_step_figure{{run=~"$run",name="{name}"}})', f"{name} {{{{run}}}}")
        for name in names
    ]
    return panel(title, about, *queries, unit=unit, **options)


LEARNING = Dashboard(
    uid="etude-learning",
    title="Étude: learning",
    about="What each step learned from, and whether the policy stays sound.",
    runs="etude_trainer_step_figure",
    rows=(
        Row(
            "Reward",
            (
                figure(
                    "Solved",
                    "Share of attempts whose hidden tests pass, on the problems of the step. Harder problems are drawn more "
                    "often as the policy gets better, so this rises more slowly than the held-out share.",
                    "solved_share",
                    unit="percentunit",
                    least=0,
                    most=1,
                ),
                figure(
                    "Gain at equal difficulty",
                    "Share of attempts solved, less the share that the policy of the run's first 160 groups would have solved of "
                    "the same problems, by estimate. It rises while the policy learns, however hard the problems become.",
                    "solved_gain",
                    unit="percentunit",
                ),
                figure(
                    "Reward",
                    "Mean over the step's attempts, and mean over its groups of the best attempt. When the best no longer "
                    "rises above the mean, attempts have become alike.",
                    "reward_mean",
                    "reward_best_mean",
                ),
                figure(
                    "Groups with a signal",
                    "Share of groups whose rewards differ. The others teach nothing: too easy or too hard.",
                    "signal_share",
                    unit="percentunit",
                    least=0,
                    most=1,
                ),
                panel(
                    "Hardness: predicted against solved",
                    "Of each bin of the chance that was predicted for a group before it came: the mean of the predictions, and "
                    "the share of attempts that were solved. Equal curves: the estimate is right. Newest 2,000 groups.",
                    (
                        'max by (bin) (etude_scheduler_calibration_bin{run=~"$run",number="predicted"})',
                        "predicted {{bin}}",
                    ),
                    (
                        'max by (bin) (etude_scheduler_calibration_bin{run=~"$run",number="solved"})',
                        "solved {{bin}}",
                    ),
                    unit="percentunit",
                    least=0,
                    most=1,
                ),
                panel(
                    "Hardness: calibration error",
                    "Expected calibration error of the solve rate (good: at most 5 %), and the share of groups whose attempts all "
                    "end alike, as predicted and as it came. These groups teach nothing.",
                    ('max by (run) (etude_scheduler_calibration{run=~"$run",number="error"})', "error {{run}}"),
                    (
                        'max by (run) (etude_scheduler_calibration{run=~"$run",number="silent_predicted"})',
                        "without a signal, predicted {{run}}",
                    ),
                    (
                        'max by (run) (etude_scheduler_calibration{run=~"$run",number="silent"})',
                        "without a signal {{run}}",
                    ),
                    unit="percentunit",
                    least=0,
                    most=1,
                ),
                panel(
                    "Terms of the reward",
                    "Sum of absolute values per second, by term. A behaviour term that grows is a habit that grows.",
                    (f"sum by (term) (rate(etude_reward_terms_total{RUN}[$__rate_interval]))", "{{term}}"),
                    stacked=True,
                ),
                figure("Length", "Tokens per attempt, of all its contexts together, mean.", "length_mean"),
                panel(
                    "How attempts end",
                    "Per second, by reason. `deadline` and limits that rise: the policy does not finish any more.",
                    (f"sum by (stop) (rate(etude_rollout_attempts_total{RUN}[$__rate_interval]))", "{{stop}}"),
                    unit="cps",
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Soundness",
            (
                figure(
                    "Entropy",
                    "Of the sampled tokens' distribution, nats. A fall to a fraction of where it began is collapse.",
                    "entropy",
                ),
                figure("Gradient norm", "Before clipping.", "grad_norm"),
                figure("Loss", "Of the policy; its absolute height says little.", "loss"),
                figure(
                    "Sampler against trainer",
                    "k3 estimate of the divergence between the engine's and the trainer's probabilities of the same tokens. "
                    "It is numerics and staleness; a jump is a defect in one of them.",
                    "mismatch_k3",
                ),
                figure(
                    "Largest log ratios",
                    "Of a token's probability in trainer and engine: median, 99th percentile, and the latter without replay "
                    "of the experts.",
                    "mismatch_log_ratio_p50",
                    "mismatch_log_ratio_p99",
                    "mismatch_unreplayed_log_ratio_p99",
                ),
                figure(
                    "Clipped weights and replaced experts",
                    "Shares of tokens. Clipped importance weights mean samples too old for the step size.",
                    "importance_clipped_share",
                    "replay_replaced_share",
                    unit="percentunit",
                ),
                figure("MTP loss", "Of the head that drafts tokens; it follows the policy.", "mtp_loss"),
                panel(
                    "Age",
                    "Greatest age of a sample in a step, in steps. The gate bounds it; above the bound is an alert and a bug.",
                    (f"max by (run) (etude_trainer_age_steps{RUN})", "{{run}}"),
                    least=0,
                ),
                panel(
                    "Alerts",
                    "Raised by any service, so far; the console's page of alerts shows the examples.",
                    (f"sum by (name) (etude_scheduler_alerts_total{RUN})", "{{name}}"),
                    least=0,
                ),
            ),
        ),
        Row(
            "Steps",
            (
                panel(
                    "Steps",
                    "Steps, and groups trained in them, per minute.",
                    (f"60 * {rate(f'etude_trainer_steps_total{RUN}', 'run')}", "steps {{run}}"),
                    (f"60 * {rate(f'etude_trainer_groups_total{RUN}', 'run')}", "groups {{run}}"),
                    least=0,
                ),
                panel(
                    "Where the trainer's time goes",
                    "Shares of all its time; together 100 %. Publishing and checkpointing: only what it waits for them.",
                    (
                        f"{rate(f'etude_trainer_time_seconds_total{RUN}', 'phase')}"
                        f" / scalar({rate(f'etude_trainer_time_seconds_total{RUN}')})",
                        "{{phase}}",
                    ),
                    unit="percentunit",
                    least=0,
                ),
                panel(
                    "Where a step's time goes",
                    "Median by phase. What the trainer publishes in the background counts too.",
                    (quantile(0.5, f"etude_trainer_phase_seconds{RUN}", "phase"), "{{phase}}"),
                    unit="s",
                ),
                panel(
                    "Tokens trained",
                    "Per second: through the model, and with loss.",
                    (rate(f"etude_trainer_tokens_total{RUN}", "kind"), "{{kind}}"),
                    unit="cps",
                ),
                figure(
                    "Prefix sharing",
                    "Share of tokens that were not computed twice, and of those that could have been saved and were not.",
                    "prefix_saved_share",
                    "prefix_lost_share",
                    unit="percentunit",
                ),
                panel(
                    "Version and incarnation",
                    "The version published last, and how often the run was taken up again.",
                    (f"max by (run) (etude_trainer_serial{RUN})", "version {{run}}"),
                    (f"max by (run) (etude_trainer_incarnation{RUN})", "incarnation {{run}}"),
                ),
                panel(
                    "Evaluation",
                    "Attempts of held-out evaluations with a result, per second, by outcome.",
                    (f"sum by (outcome) (rate(etude_evaluator_attempts_total{RUN}[$__rate_interval]))", "{{outcome}}"),
                    ("sum (etude_evaluator_open_evaluations)", "open evaluations"),
                ),
            ),
        ),
    ),
)
