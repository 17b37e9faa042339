"""The base policy's recipe: pretraining → SFT on agent traces → MTP self-distillation (docs/base.md).

Consumes: a pack directory (`etude tasks mutate`). It trains on the train split alone and measures on dev. Only the leak
report reads held-out.
Produces: a checkpoint directory (Hugging Face files, tokenizer, etude.json, card, curves, signatures), shipped in
etude/data/base. No message, no service: `etude base make|sft|probe|leaks`.

`streams` turns a pack into arrays of samples (`corrupt` for pretraining, `traces` for SFT), `launch` runs phases in
data-parallel processes (`train`, `loss`, `optim`), `recipe` puts them in order, `probe` plays dev problems, `leak` proves
what was not seen.

Invariants:
- Equal pack and seed give equal streams. Training ends by the clock, so weights depend on the machine.
- Observations in traces are real: wrong candidates ran in a sandbox. They carry no loss; what follows them does.
- MTP distillation changes no bit of the trunk.
- Every function of a stream is in `signatures.npz`, and packs are filtered against it.
"""
