"""`etude figures`: a run's figures for TensorBoard, Weights & Biases, MLflow, or a file of lines.

Owns: nothing; it only reads. Consumes: runs.state, steps.committed, policies.published, evals.finished, each from its
beginning and without a group; runs/RUN/config.json. Produces: points where people look at curves.

Invariants:
- Called again it adds what is new: a target says itself what it holds, and nothing is kept elsewhere.
- A curve has one value per step, the one of the surviving lineage: what a target holds of steps that are dead by now is
  discarded, or where nothing can be discarded left for a fresh curve (`sink.Sink.discard`).
- Names are those of docs/figures.md and stay.
"""
