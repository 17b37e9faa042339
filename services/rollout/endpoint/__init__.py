"""The recording endpoint: agents that are not ours speak OpenAI's or Anthropic's API to it, and every token is recorded.

Read in this order: `tree` (what was sampled, as a tree of appended tokens), `history` (which of it a request goes on from),
`recording` (one attempt: prompt, limits, answer), `server` (HTTP), `foreign` (the attempt's life beside the agent of ours),
`bridge` (the way out of a sandbox).

Invariants:
- A prompt is only appended to. Ids that were sampled stay as they were, whatever text a client sends back.
- Every sampled id that a client got is trained in exactly one segment. The reward of the attempt goes to all segments.
- What cannot be recorded exactly is refused, by the name of the field.
- A key opens one attempt, for as long as it lasts.
"""
