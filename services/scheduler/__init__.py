"""The scheduler: which problem next, how many in flight, what became of each attempt.

Owns: the ledger (its only writer), the capacity gate, the choice of problems, redelivery of attempts, the life of a run,
    and what of a run's objects is deleted, when nobody needs it.
Consumes: problems.admitted, attempts.progress, rollouts.finished, rollouts.scored, groups.quarantined, steps.committed,
    policies.published, policies.applied, policies.promoted (what must be kept), runs.commands, runs.state (its own: does
    one come late?), alerts (those that pause a run; that of a quota is its own).
    Evaluations (key.purpose == evaluate) are not its business.
Produces: rollouts.requested, groups.ready, attempts.cancel, runs.state (it alone), alerts.

Invariants:
- One transaction per batch of messages, one more for every fork among them: what they changed, the events that say so, and
  the messages that follow from them (outbox). Deliveries are acknowledged after the last commit, the outbox is published
  after it too: kill -9 at any moment loses nothing, and doubles at most a message that its reader recognises.
- What is kept in memory (`working_set`) is a cache of the ledger. It is rebuilt from it at start and after any failure.
- Decisions follow from the ledger's state, never from which message has just come (`decisions` is level-triggered), so
  a restart decides what the old process would have decided.
- One scheduler writes at a time (`leadership`); others wait and take over within ten seconds.
- Its time never goes back (`clock`), whatever the machine's does.

How it is built: `gate`, `shares`, `hardness`, `reconciler`, `rotation`, `life` are pure rules, as is `shared.contracts.lineage`;
`working_set` is a run in memory (`records`; `catalogue`: its problems, drawn by `sampler`, in `columns`); `intake` applies
messages to it (`control`: what people say); `decisions` draws the conclusions, `requesting` asks for more; `desk` does one
batch against `store`; `relay` publishes the outbox; `service` wires them; beside them `housekeeping` counts and deletes
objects (`garbage`, `quota`: pure; `sweep` asks the ledger); `audit` checks a run from the ledger alone; `api` answers how
hard problems are and why (`standing`), from a snapshot of the ledger, to whoever asks.
"""
