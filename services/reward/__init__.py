"""Reward: runs the hidden tests, scores behaviour, applies the length penalty, watches for drift.

Consumes `rollouts.finished` (failed rollouts pass by: the scheduler reads the same topic) and `runs.state`; produces
`rollouts.scored` and `alerts`. Grading is done by Celery workers (`python -m services.reward.grader`), a batch of attempts
per job, each in a fresh sandbox; they leave verdicts in the object store.

Invariants:
- A finished rollout stays unacknowledged until its score is published: a crash anywhere grades it again.
- The first verdict written for an (attempt, epoch) is the verdict; every later grading returns that one.
- Three outcomes. Scored; the agent's error (scored, unsolved, `Verdict.error` names it); infrastructure's error (given
  again, then `RolloutFailed`), which never becomes a reward.
- Expected outputs never enter a sandbox, and the terms of a reward add up to it.
"""
