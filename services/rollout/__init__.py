"""Rollout: runs the agent and records, exactly, what its policy saw and sampled.

Owns: attempts in hand, from claim to result. Consumes: rollouts.requested (group "rollout"); policies.applied,
attempts.cancel and runs.state (everybody hears them). Produces: attempts.progress (claims, heartbeats, checkpoints),
rollouts.finished; trajectory, routing and rollout checkpoints below `runs/<run>/attempts/<attempt>/<epoch>/`.

Invariants:
- A request is acknowledged only when its claim is durable; from then on the ledger's lease owns the attempt. A worker that
  dies takes at most a turn of each attempt with it, or the seconds between two checkpoints: its attempts come again under the
  next epoch, from their last rollout checkpoint (`checkpoint`, `keeping`).
- Token ids are recorded as sent and sampled (`recorder`); no text is tokenised again.
- While no engine is usable, attempts wait. A generation lost with its engine is continued behind the tokens that the engine told.
- Infrastructure never reads as an outcome: such attempts end as RolloutFailed, without a trajectory.

Read `agent` first, then `recorder`, `checkpoint`, `inference`, `service`.
"""
