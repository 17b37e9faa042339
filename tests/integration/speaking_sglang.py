"""The stand-in for SGLang (fake_sglang.py) that says, token by token, what the file of FAKE_SGLANG tells it to: {"say": [ids]}.
It streams, and ends at stop tokens."""

from __future__ import annotations

import asyncio

import fake_sglang  # type: ignore[import-not-found]  # beside this file, which is started by its path
from aiohttp import web


class Speaking(fake_sglang.Fake):  # type: ignore[misc]
    async def generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        self.asked.append(body)
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if body["stream"]:
            await out.prepare(http)
        params, said = body["sampling_params"], fake_sglang.knobs()["say"]
        tokens: list[int] = []
        finish: dict[str, object] | None = None
        while finish is None:
            await asyncio.sleep(fake_sglang.TOKEN_S)
            await self.going.wait()
            if any(body["rid"].startswith(a) for a in self.aborted):
                finish = {"type": "abort", "message": "Aborted"}
            else:
                tokens.append(said[len(tokens)])
                if tokens[-1] in params["stop_token_ids"]:
                    finish = {"type": "stop", "matched": tokens[-1]}
                elif len(tokens) == params["max_new_tokens"]:
                    finish = {"type": "length", "length": len(tokens)}
            meta = {
                "id": body["rid"],
                "finish_reason": finish,
                "prompt_tokens": len(body["input_ids"]),
                "weight_version": self.version,
                "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}] if tokens else [],
                "output_token_logprobs": [[-1.0, token, None] for token in tokens],
            }
            answer = {"text": "", "output_ids": tokens, "meta_info": meta}
            if body["stream"]:
                await out.write(b"data: " + web.json_response(answer).body + b"\n\n")  # type: ignore[operator]
        if not body["stream"]:
            return web.json_response(answer)
        await out.write(b"data: [DONE]\n\n")
        await out.write_eof()
        return out


if __name__ == "__main__":
    fake_sglang.Fake = Speaking
    fake_sglang.main()
