"""Makes and admits problems.

Owns: the making of packs from installed code and from projects (`mutate`: `etude tasks mutate`), the admission gate.
Consumes: `runs.state` (runs whose problems are not all admitted), as one of a group; the pack, its hidden part and
    the base policy's chat format from the object store.
Produces: `problems.admitted`, `alerts` for what the gate refuses.

Invariants:
- A problem is admitted only if its solution passes every case and its broken state does not, both seen in the sandbox,
  and if the base policy's chat format can take it.
- Hidden parts go to the object store under a key of their own and into no message.
- A pack follows from the Python version, the installed distributions and the generator version; its splits share no
  function and no near-duplicate, on any machine.
- Admission is idempotent: the same run admits the same problems in the same batches.
"""
