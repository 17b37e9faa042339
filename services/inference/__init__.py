"""Inference: serves the policy. An embedded engine that speaks SGLang's HTTP API, or SGLang itself (`sglang`), and the
agent that feeds either with weights.

Owns: the live weights of this replica, its key-value cache.
Consumes: runs.state (which run), policies.published (broadcast), for evaluations also evals.requested and evals.finished,
in the pool "serving" policies.promoted instead of following a run;
versions from the object store.
Produces: policies.applied; answers to POST /generate and, for conversations in text, POST /v1/chat/completions.

Read in this order: `service` (wiring), `contract` and `api` (HTTP), `engine` (its thread), `batching` (the loop), `cache`,
`attention` and `sampler`, or `fused` and `kernels` where a CPU computes a step in one call, then `weights_agent` (how a version
gets from the object store into the running engine; which one and of which run, `following`, `candidates` and `pins` decide) and
`updates` (weights from a folder, where no run is followed). `live` is what an engine has to be, `chat` how a conversation becomes
token ids and back.

Invariants:
- Every sampled token carries the serial that sampled it, its log-probability under the sampling temperature and, per
  position, the experts that were used; a request also the oldest serial whose keys and values it read.
- What serves is, bit for bit, the published version: the checksum of the live weights is compared with the manifest.
- A session keeps its cache over a swap; a new session never hits entries of another `extra_key`.
- A client that goes away, or neither sends nor reads (`limits`), frees its row.
- Only plain temperature sampling: top-p, top-k, penalties and what no engine knows are refused.
"""
