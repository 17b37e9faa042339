"""POST /v1/chat/completions: a conversation in text, sampled by the same path as /generate. All of it is pure but the reading of
a checkpoint's files (`template`); the route is `services.inference.contract`'s, and so every engine's.

Read in this order: shared.chat.openai (what may be asked), `template` (messages to token ids, by the checkpoint's own chat
template), shared.chat.reader (sampled ids to text, stop sequences), `calls` (tool calls within the text), `talk` (one
conversation's turn: the /generate request that it is, the completion and the chunks that come of it).

Invariants:
- What is sampled is what /generate samples from the same ids: plain temperature sampling, refused otherwise.
- A stream's pieces together are the whole answer: both are made by the same reader, token by token.
- Nothing that the model said is lost: what is no well-formed tool call is content, to the letter; white space
  around a call is part of it.
- A generation that was aborted is no completion: 503, or an error event where the stream has begun.
"""
