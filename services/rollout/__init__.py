"""Rollout: runs the agent and records, exactly, what its policy saw and sampled.

Owns: attempts in hand, from claim to result. Consumes: rollouts.requested (group "rollout"); policies.applied,
attempts.cancel and runs.control (everybody hears them). Produces: attempts.progress (claims, heartbeats),
rollouts.finished; trajectory and routing below `runs/<run>/attempts/<attempt>/<epoch>/`.

Invariants:
- A request is acknowledged only when its claim is durable; from then on the ledger's lease owns the attempt. A worker that
  dies takes nothing with it but time: its attempts come again under the next epoch, from the beginning.
- Token ids are recorded as sent and sampled (`recorder`); no text is tokenised again.
- While no engine is usable, attempts wait. A generation lost with its engine is asked for again from the recorded tokens.
- Infrastructure never reads as an outcome: such attempts end as RolloutFailed, without a trajectory.

Read `agent` first, then `recorder`, `inference`, `service`.
"""
