"""The console: a web page that shows what happens, from messages and objects alone.

Owns: nothing. What it shows is rebuilt from the bus each time it starts.
Consumes: runs.control, steps.committed, rollouts.scored, policies.published, policies.applied, evals.finished and alerts,
all as broadcast (no group, no commits); run configurations, problem packs, chat formats and trajectories from the object
store; `<state>/run/*.json` and `/readyz` of the services beside it.
Produces: pages. No message, no object.

Invariants:
- It reads only. Nothing that a page does changes a run, and it never touches the ledger.
- Text made by an agent or a model is hostile: every value is escaped, control and bidirectional characters are made
  visible, and the pages forbid scripts, styles and connections other than their own (Content-Security-Policy).
- It answers requests for this machine's names only (no DNS rebinding) and listens on localhost unless told otherwise.
- Memory is bounded per run: figures per version and step, and the last few thousand attempts.
"""
