"""SGLang as the engine of a replica: a server of its own, supervised as a child process or attached to by its URL.

Owns: the child, the folders that it loads versions from. What others ask for is the same as of the embedded engine.

Read in this order: `settings`, `flags` (settings to command line), `mapping` (our contract to SGLang's and back),
`child` (one process: started, watched, ended), `client` (its HTTP API), `layout` and `hashes` (what its weights must
hash to), `files` (a version as a folder that it loads), `live` (versions in and out), `api` (HTTP), `kind` (wiring).

Invariants:
- `flags`, `mapping`, `layout`, `hashes`, `blocks` are pure: they run without SGLang and without a GPU, and are tested so.
- A version samples only once the checksums of SGLang's own tensors equal those reckoned from the published bits.
- A load that failed is undone by loading what served before, and where that fails by a new process.
- The child never outlives this process. The facts about SGLang hold for the version in `flags.WRITTEN_FOR`.
"""
