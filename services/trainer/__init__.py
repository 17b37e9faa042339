"""The trainer turns groups of scored attempts into policy versions.

Owns: the policy's float32 masters and optimiser, the run's incarnations and step checkpoints, the serials.
Consumes: runs.state, groups.ready.
Produces: policies.published, steps.committed (commits and new incarnations), groups.quarantined, alerts; objects under
`runs/<run>/policies`, `runs/<run>/checkpoints`, `runs/<run>/incarnations`.

Invariants:
- A group is trained at most once in the lineage of the surviving weights: a checkpoint names all groups it contains, and
  an announcement of one of them is dropped.
- The forward runs on exactly the bf16 values that are published; a version's objects are durable before its message.
- A serial is never reused, and a process that a newer incarnation has superseded publishes nothing more.
- A resume gives the same weights, bit for bit, as if nothing had happened, when the same groups follow.
- What cannot be trained goes to quarantine with the reason and never stops a step.
- A batch in which no token has a gradient moves nothing. A weight that is not finite is never published.

`groups.ready` is acknowledged when the group is in hand, not when it is trained. That loses nothing: the ledger holds
every ready group until a surviving step names it. A trainer that dies is followed by a new incarnation, and on
`IncarnationStarted` the scheduler announces all groups again that its lineage has not trained, in ledger order. An
announcement to a later incarnation is not acknowledged: who hears it has been superseded. It reads no more groups and stays
up, not ready, until another run begins: ended, it would be started again and take the run back.

A step's version and checkpoint are made durable, and announced, by another thread while the next step computes (`publishing`).
The order of durability is that of a trainer that waits, and so is every number.

Where to read: `service` (wiring) → `training` (a run's life) → `step` (one update) → `loss`, `packing`, `layout`,
`replay`, `engine`; `publishing`, `versions`, `checkpoints` (durability); `shares` (where the time goes); `base/` makes the policy
that RL starts from.
"""
