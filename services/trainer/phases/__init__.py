"""Training on data: continued pretraining, long context, SFT and MTP distillation (docs/phases.md).

The step, the engine, the loss and the packing are those of RL. A document or a conversation is a unit without siblings; its
loss is the negative log-likelihood of its own tokens (`step.Trainer(supervised=True)`).

Invariants:
- A phase that was interrupted and starts again writes the same weights and the same losses, bit for bit, as one that was not.
- No token attends to another document.
- What cannot be trained is refused before anything is written; the text names the file and the field.

Where to read: `config` (what a phase is told) → `data` (sequences in their order) → `phase` (the loop) → `state` (durability);
`shards` and `corpus` make token files of folders, `conversations` makes sequences of chats, `heldout` and `report` measure.
"""
