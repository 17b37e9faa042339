"""The console: a web page that shows what happens, from messages and objects alone, and passes on what people decide.

Owns: who may look and act (tokens, sessions). What it shows is rebuilt from the bus each time it starts.
Consumes: runs.commands, runs.state, steps.committed, rollouts.finished, rollouts.scored, policies.published, policies.applied,
evals.finished and alerts, all as broadcast (no group, no commits); run configurations, problem packs, chat formats,
trajectories, their routing and what graders found from the object store; `<state>/run/*.json` and `/readyz` of the services
beside it; the scheduler's `/hardness`.
Produces: pages; runs.commands (start, pause, resume, rollback, stop) with the name of whoever gives them; the configuration of a
run that is started, never over another. No other object, no word to the ledger.

Invariants:
- Nothing is done without an operator's token: a session that began with one and a form of that session, or the token in the
  `Authorization` header. Requests that change something are refused when they come from another site. Wrong tokens are
  counted and soon told to wait; a right one always passes. Where others than this machine can reach the console, reading
  needs a token too.
- The record of who did what when is `runs.commands` itself; the console keeps none of its own. From where, and who signed in
  or was refused, its log says.
- Text made by an agent or a model is hostile: every value is escaped, control and bidirectional characters are made
  visible, and the pages forbid scripts, styles and connections other than their own (Content-Security-Policy).
- It answers requests for this machine's names only (no DNS rebinding) and listens on localhost unless told otherwise.
- An attempt that is read twice counts once, however long ago it was read first.
- Memory is bounded: per run figures per version and step, and the last few thousand attempts of the last few runs; of every
  other attempt a hash, by which it is known again.
"""
