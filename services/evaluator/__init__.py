"""Evaluator: measures one pinned version on a held-out pack, and says with what certainty.

Owns: which attempts an evaluation consists of, and its figures. Consumes: evals.requested; rollouts.scored,
rollouts.finished and attempts.progress of attempts with purpose "evaluate" (group "evaluator"). Produces:
rollouts.requested (pinned), evals.finished; the report at `runs/<run>/evals/<eval>/report.json`.

Invariants:
- The state of an evaluation lies in the object store: the request (`evals/open/…`) before it is acknowledged, verdicts
  (`runs/<run>/evals/<eval>/parts/…`) before theirs are. A restart goes on where it was; nothing is lost or counted twice.
- Attempt ids are a hash of evaluation, problem and index: asking again names the same attempt. The first verdict counts.
- An attempt lost to infrastructure is asked for again; what is lost for good is counted apart, never as unsolved.

One evaluator serves a deployment, like the scheduler; a second one would take verdicts from the first.
"""
