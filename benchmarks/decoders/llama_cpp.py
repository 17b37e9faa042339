"""llama.cpp on a checkpoint, by llama-cpp-python's plain bindings: python -m benchmarks.decoders.llama_cpp CHECKPOINT

The checkpoint (Qwen3, Qwen3-MoE) is written as GGUF in float32 first. Decoding is llama.cpp's own batched loop: all
sequences in one `llama_decode` per token, its sampler chain (temperature, then a draw) per sequence; the cache in float16,
which is its default. Runs in an environment of its own (`benchmarks.decode` makes it).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import gguf
import llama_cpp as L
import numpy as np
import safetensors

from benchmarks.decoders import Batch, Took, memory_mib, serve

PLAIN = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
OF_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def tensors(checkpoint: Path) -> dict[str, np.ndarray]:
    """All in float32."""
    found = {}
    for name, tensor in safetensors.deserialize((checkpoint / "model.safetensors").read_bytes()):
        raw = bytes(tensor["data"])
        if tensor["dtype"] == "BF16":
            array = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif tensor["dtype"] == "F32":
            array = np.frombuffer(raw, np.float32)
        else:
            raise ValueError(f"{name}: {tensor['dtype']}; known: BF16, F32")
        found[name] = array.reshape(tensor["shape"])
    return found


def write_gguf(checkpoint: Path, out: Path) -> None:
    config, found = json.loads((checkpoint / "config.json").read_text()), tensors(checkpoint)
    moe = "num_experts" in config
    writer = gguf.GGUFWriter(str(out), "qwen3moe" if moe else "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    if moe:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    for name, target in PLAIN.items():
        if name in found:
            writer.add_tensor(target, found[name])
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, target in OF_LAYER.items():
            if prefix + name in found:
                writer.add_tensor(f"blk.{layer}.{target}", found[prefix + name])
        for part in ("gate", "up", "down") if moe else ():
            experts = [found[f"{prefix}mlp.experts.{e}.{part}_proj.weight"] for e in range(config["num_experts"])]
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", np.stack(experts))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Llama:
    def __init__(self, path: Path) -> None:
        L.llama_backend_init()
        self.model = L.llama_model_load_from_file(str(path).encode(), L.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {path}")

    def decode(self, batch: Batch) -> Took:
        B, P = len(batch.prompts), len(batch.prompts[0])
        params = L.llama_context_default_params()
        params.n_ctx = B * (P + batch.new + 8)
        params.n_seq_max = B
        params.n_batch = params.n_ubatch = max(512, B)
        params.n_threads = params.n_threads_batch = 1
        context = L.llama_init_from_model(self.model, params)
        room = L.llama_batch_init(params.n_batch, 0, 1)
        chain = self.sampler(batch.temperature)
        try:
            began = time.perf_counter()
            last: list[int] = []
            for sequence, prompt in enumerate(batch.prompts):
                for start in range(0, P, params.n_batch):
                    piece = prompt[start : start + params.n_batch]
                    room.n_tokens = len(piece)
                    for i, token in enumerate(piece):
                        self.put(room, i, token, start + i, sequence, wanted=start + i == P - 1)
                    self.compute(context, room)
                last.append(L.llama_sampler_sample(chain, context, room.n_tokens - 1))
            first = time.perf_counter() - began
            room.n_tokens = B
            for step in range(1, batch.new):
                for sequence, token in enumerate(last):
                    self.put(room, sequence, token, P + step - 1, sequence, wanted=True)
                self.compute(context, room)
                last = [L.llama_sampler_sample(chain, context, i) for i in range(B)]
            return Took(time.perf_counter() - began, first, B * batch.new, memory_mib())
        finally:
            L.llama_sampler_free(chain)
            L.llama_batch_free(room)
            L.llama_free(context)

    @staticmethod
    def sampler(temperature: float) -> object:
        chain = L.llama_sampler_chain_init(L.llama_sampler_chain_default_params())
        if temperature == 0:
            L.llama_sampler_chain_add(chain, L.llama_sampler_init_greedy())
            return chain
        L.llama_sampler_chain_add(chain, L.llama_sampler_init_temp(temperature))
        L.llama_sampler_chain_add(chain, L.llama_sampler_init_dist(1))
        return chain

    @staticmethod
    def put(room: object, at: int, token: int, position: int, sequence: int, *, wanted: bool) -> None:
        room.token[at], room.pos[at], room.logits[at] = token, position, wanted  # type: ignore[attr-defined]
        room.n_seq_id[at], room.seq_id[at][0] = 1, sequence  # type: ignore[attr-defined]

    @staticmethod
    def compute(context: object, room: object) -> None:
        if code := L.llama_decode(context, room):
            raise RuntimeError(f"llama_decode: {code}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(Path(sys.argv[1]), path)
        llama = Llama(path)
    serve(f"llama.cpp (llama-cpp-python {L.__version__}), GGUF float32, cache float16, 1 thread", llama.decode)


if __name__ == "__main__":
    main()
