"""One turn of a conversation: the /generate request that it is, and the completion, or the chunks, that come of its answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from services.inference.chat.calls import HERMES, Call, content_of, parse, settled
from services.inference.chat.template import ChatTemplate
from services.inference.wire import GenerateRequest, SamplingParams, Unavailable
from shared.chat.openai.request import names, require_calls, schemas, turns
from shared.chat.openai.structs import ChatRequest
from shared.chat.reader import REPLACEMENT, Reader


class Talk:
    """`generate`, `sampling`: what is to be sampled. Raises BadRequest. `context`: positions that a session has."""

    def __init__(self, asked: ChatRequest, template: ChatTemplate, *, context: int) -> None:
        require_calls(asked)
        prompt = template.prompt(turns(asked), schemas(asked), names(asked), context=context)
        self._asked, self._tokenizer = asked, template.tokenizer
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self._calls, self._thinking = template.calls or HERMES, template.opens_thinking(prompt)
        hidden = template.hidden_from_readers if asked.offered else template.hidden
        self._reader = Reader(template.tokenizer, hidden, asked.stops)
        self._prompt = prompt
        self._tokens: list[int] = []  # all that were heard
        self._sent = self._sent_tokens = 0  # characters of the content, and tokens, that were given out as chunks
        self.streams = bool(asked.stream)
        self.generate = GenerateRequest(
            input_ids=prompt,
            rid=self._id,
            return_logprob=bool(asked.logprobs),
            stream=self.streams or bool(asked.stops),  # a stop sequence is found while it is sampled
        )
        self.sampling = SamplingParams(
            temperature=1.0 if asked.temperature is None else asked.temperature,
            max_new_tokens=asked.limit or context + 1 - len(prompt),
            stop_token_ids=sorted(template.stop_tokens) or None,
            sampling_seed=asked.seed,
        )

    # -- while it is sampled -----------------------------------------------------------------------------------------

    def hear(self, tokens: Sequence[int]) -> bool:
        """All tokens so far; returns whether they are enough."""
        self._tokens = list(tokens)
        self._reader.feed(tokens[self._reader.tokens :])
        return self._reader.stopped

    def first_chunk(self) -> dict[str, Any]:
        return self._chunk({"role": "assistant", "content": ""}) | self._prompt_ids()

    def chunks(self) -> Iterator[dict[str, Any]]:
        """What is new of the content, and can be given out."""
        new = self._reader.text[self._sent : self._reader.settled]
        if self._asked.offered:
            new = new[: settled(new, self._calls)]
        if new:
            self._sent += len(new)
            yield self._chunk({"content": new}, ids=self._new_ids())

    # -- once it is over ---------------------------------------------------------------------------------------------

    def last_chunks(self, answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """What is left of the content, the calls, the reason of the end with what is told of the whole. `answer`: /generate's.
        Raises Unavailable."""
        whole = self.completion(answer)
        choice = whole["choices"][0]
        if rest := (choice["message"]["content"] or "")[self._sent :]:
            yield self._chunk({"content": rest})
        for i, call in enumerate(choice["message"].get("tool_calls", [])):
            yield self._chunk({"tool_calls": [{"index": i, **call}]})
        versions = {name: whole[name] for name in ("weight_version", "weight_versions")}
        yield self._chunk({}, choice["finish_reason"], choice["logprobs"], self._new_ids()) | versions
        if self._asked.stream_options is not None and self._asked.stream_options.include_usage:
            yield {**self._chunk({}), "choices": [], "usage": whole["usage"]}

    def completion(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Of /generate's answer. Raises Unavailable where it was aborted: half an answer must not pass for one."""
        tokens, meta, reader = answer["output_ids"], answer["meta_info"], self._reader
        self.hear(tokens)
        reader.close()
        reason = "stop" if reader.stopped else meta["finish_reason"]["type"]
        if reason == "abort":
            raise Unavailable(f"the generation was aborted: {meta['finish_reason'].get('message', '')}")
        parts: list[str | Call] = self._parse(reader.text) if self._asked.offered else [reader.text]
        calls = [part for part in parts if isinstance(part, Call)]
        message: dict[str, Any] = {"role": "assistant", "content": content_of(parts)}
        if calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [self._call(i, call) for i, call in enumerate(calls)]
            reason = "tool_calls" if reason == "stop" else reason  # one cut short may have had more to call
        spans = _first(meta["weight_versions"], reader.tokens)
        pairs = meta.get("output_token_logprobs", [])[: reader.tokens]
        told = {"content": [self._logprob(*pair) for pair in pairs]} if self._asked.logprobs else None
        return {
            **self._head("chat.completion"),
            **self._prompt_ids(),
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "finish_reason": reason,
                    "logprobs": told,
                    **self._ids(tokens[: reader.tokens]),
                }
            ],
            "usage": {
                "prompt_tokens": meta["prompt_tokens"],
                "completion_tokens": reader.tokens,
                "total_tokens": meta["prompt_tokens"] + reader.tokens,
                "prompt_tokens_details": {"cached_tokens": meta["cached_tokens"]},
            },
            "weight_version": spans[-1]["version"] if spans else meta["weight_version"],
            "weight_versions": spans,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._asked.model or "etude"}

    def _parse(self, text: str) -> list[str | Call]:
        schemas = {tool.function.name: tool.function.parameters or {} for tool in self._asked.offered}
        return parse(text, self._calls, self._thinking, schemas)

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompt} if self._asked.return_token_ids else {}

    def _ids(self, tokens: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(tokens)} if self._asked.return_token_ids else {}

    def _new_ids(self) -> dict[str, Any]:
        """Of the tokens that were heard and read, those that no chunk has told of."""
        new = self._tokens[self._sent_tokens : self._reader.tokens]
        self._sent_tokens += len(new)
        return self._ids(new)

    def _chunk(
        self, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None, ids: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs, **(ids or {})}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _call(self, i: int, call: Call) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": f"call_{self._id.removeprefix('chatcmpl-')}_{i}", "type": "function", "function": function}

    def _logprob(self, logprob: float, id: int, _: Any) -> dict[str, Any]:
        token = self._tokenizer.decode([id], skip_special_tokens=False)
        octets = None if REPLACEMENT in token else list(token.encode())  # half a character's are not known here
        return {"token": token, "logprob": logprob, "bytes": octets, "top_logprobs": []}


def _first(spans: list[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    """Of the first n tokens."""
    return [{**span, "end": min(n, span["end"])} for span in spans if span["start"] < n]
