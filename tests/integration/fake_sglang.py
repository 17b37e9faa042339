"""A stand-in for SGLang's server: its HTTP API as far as we use it, no model behind it. Started as a child, in its place.

It loads folders and reports the hashes of a Qwen3-MoE's fused tensors (written here anew), samples tokens that
mean nothing, pauses, and records what it was asked. What goes wrong is told by a JSON file that FAKE_SGLANG names:

    {"exit": "text"}        ends at once, with these last words
    {"no_room": 96}         ends at once where the model has so many words
    {"deaf": true}          never answers /health
    {"flip": "7"}           version 7 is loaded with one bit flipped
    {"refuse": ["7"]}       versions whose update is answered with 400; what served is half overwritten then
    {"die": "7"}            the process ends in the middle of that update
    {"slow": 1.5}           an update takes so many seconds
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

TOKEN_S = 0.01


def knobs() -> dict[str, Any]:
    path = Path(os.environ.get("FAKE_SGLANG", "/nonexistent"))
    return json.loads(path.read_text()) if path.exists() else {}


def load_file(path: Path) -> dict[str, np.ndarray]:
    """A safetensors file of bf16 tensors, in float32."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    out: dict[str, np.ndarray] = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16"
            first, last = (start + at for at in entry["data_offsets"])
            bits = np.frombuffer(data[first:last], np.uint16).astype(np.uint32) << 16
            out[name] = bits.view(np.float32).reshape(entry["shape"])
    return out


def fused(folder: Path) -> dict[str, np.ndarray]:
    """The parameters of a Qwen3-MoE in SGLang, of one rank, in float32."""
    config = json.loads((folder / "config.json").read_text())
    raw: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        raw |= load_file(path)
    out: dict[str, np.ndarray] = {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        out[name] = np.pad(raw[name], ((0, -config["vocab_size"] % 64), (0, 0)))
    out["model.norm.weight"] = raw["model.norm.weight"].copy()
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        a = p + "self_attn."
        norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
        for same in (*norms, "self_attn.o_proj", "mlp.gate"):
            out[f"{p}{same}.weight"] = raw[f"{p}{same}.weight"]
        out[a + "qkv_proj.weight"] = np.concatenate([raw[f"{a}{x}_proj.weight"] for x in "qkv"])
        experts = [f"{p}mlp.experts.{e}." for e in range(config["num_experts"])]
        both = [np.concatenate([raw[e + "gate_proj.weight"], raw[e + "up_proj.weight"]]) for e in experts]
        out[p + "mlp.experts.w13_weight"] = np.stack(both)
        out[p + "mlp.experts.w2_weight"] = np.stack([raw[e + "down_proj.weight"] for e in experts])
    return out


class Fake:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.version = arguments.weight_version
        self.weights = fused(Path(arguments.model_path))
        self.going = asyncio.Event()
        self.going.set()
        self.asked: list[dict[str, Any]] = []
        self.aborted: set[str] = set()
        self.paused_by = ""
        self.flushes = self.refused = 0

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if knobs().get("deaf") else 200)

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": self.arguments.model_path, "weight_version": self.version})

    async def server_info(self, _: web.Request) -> web.Response:
        flags = vars(self.arguments)
        now = {
            "asked": self.asked,
            "flushes": self.flushes,
            "refused": self.refused,
            "going": self.going.is_set(),
            "pid": os.getpid(),
        }
        return web.json_response({**flags, **knobs().get("info", {}), **now})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text="# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs 3.0\n")

    async def generate(self, http: web.Request) -> web.Response:
        body = await http.json()
        self.asked.append(body)
        params, prompt, rid = body["sampling_params"], body["input_ids"], body["rid"]
        tokens: list[int] = []
        spans: list[dict[str, Any]] = []
        finish: dict[str, Any] = {"type": "length", "length": params["max_new_tokens"]}
        while len(tokens) < params["max_new_tokens"]:
            await asyncio.sleep(TOKEN_S)
            await self.going.wait()
            if any(rid.startswith(a) for a in self.aborted):
                finish = {"type": "abort", "message": "Aborted"}
                break
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": len(tokens), "end": 0})
            tokens.append((prompt[0] + len(tokens)) % 50)
            spans[-1]["end"] = len(tokens)
        meta = {
            "id": rid,
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "weight_version": self.version,
            "weight_versions": spans,
            "num_retractions": 0,
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
        }
        if body.get("return_routed_experts"):
            rows = np.zeros((len(prompt) + len(tokens) - 1 - body["routed_experts_start_len"], 2, 2), np.int32)
            meta["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
        return web.json_response({"text": "", "output_ids": tokens, "meta_info": meta})

    async def abort(self, http: web.Request) -> web.Response:
        body = await http.json()
        self.aborted.add(body.get("rid", ""))  # "" begins every id
        return web.Response()

    async def pause(self, http: web.Request) -> web.Response:
        self.paused_by = (await http.json())["mode"]
        assert self.paused_by in ("in_place", "retract")
        self.going.clear()
        return web.json_response({"status": "ok"})

    async def proceed(self, _: web.Request) -> web.Response:
        self.going.set()
        return web.json_response({"status": "ok"})

    async def update(self, http: web.Request) -> web.Response:
        body = await http.json()
        assert not self.going.is_set(), "an update of a server that samples"
        version, wrong = body["weight_version"], knobs()
        if wrong.get("die") == version:
            os._exit(9)
        await asyncio.sleep(wrong.get("slow", 0))
        new = fused(Path(body["model_path"]))
        if version in wrong.get("refuse", []):
            self.refused += 1
            name = next(iter(new))
            self.weights[name] = new[name]  # SGLang's own way back reads the new folder again
            return web.json_response(
                {"success": False, "message": "Failed to update weights: out of memory"}, status=400
            )
        if wrong.get("flip") == version:
            new["model.norm.weight"].view(np.int32)[0] ^= 1
        self.weights, self.version = new, version
        if body["flush_cache"] != (self.paused_by == "retract"):  # a session that stands still keeps its entries
            return web.json_response({"success": False, "message": "Flush cache failed"}, status=400)
        self.flushes += body["flush_cache"]
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})

    async def check(self, http: web.Request) -> web.Response:
        assert (await http.json())["action"] == "checksum"
        sums = {n: hashlib.sha256(t.tobytes()).digest()[:8].hex() for n, t in self.weights.items()}
        place = [{"role": "target", "tp_rank": 0, "tp_size": 1}]
        ranks = [{"checksums": sums, "per_gpu_checksum": "", "parallelism_info": place}]
        return web.json_response({"success": True, "message": "Success.", "ranks": ranks})


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model-path", "--weight-version", "--host", "--port", "--context-length", "--dtype"):
        parser.add_argument(name)
    arguments, _ = parser.parse_known_args()
    arguments.context_length = int(arguments.context_length)
    if words := knobs().get("exit"):
        sys.exit(words)
    if json.loads((Path(arguments.model_path) / "config.json").read_text())["vocab_size"] == knobs().get("no_room"):
        sys.exit("RuntimeError: not enough memory")
    print("[2026-01-01 00:00:00 TP0] The server is fired up and ready to roll!", flush=True)
    fake = Fake(arguments)
    app = web.Application()
    app.add_routes(
        [
            web.get("/health", fake.health),
            web.get("/model_info", fake.model_info),
            web.get("/server_info", fake.server_info),
            web.get("/metrics", fake.metrics),
            web.post("/generate", fake.generate),
            web.post("/abort_request", fake.abort),
            web.post("/pause_generation", fake.pause),
            web.post("/continue_generation", fake.proceed),
            web.post("/update_weights_from_disk", fake.update),
            web.post("/weights_checker", fake.check),
            web.post("/flush_cache", fake.proceed),
        ]
    )
    web.run_app(app, host=arguments.host, port=int(arguments.port), print=None)


if __name__ == "__main__":
    main()
