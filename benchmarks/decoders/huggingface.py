"""transformers' `generate` on a checkpoint: python -m benchmarks.decoders.huggingface CHECKPOINT [static]

Eager with the dynamic cache by default; `static`: with the preallocated cache that its documentation recommends for
compiled decoding (which `generate` then compiles by itself where it can)."""

from __future__ import annotations

import sys
import time

import torch
import transformers

from benchmarks.decoders import Batch, Took, memory_mib, serve


class _First(transformers.generation.streamers.BaseStreamer):
    """Notes when the first token came; `generate` calls it with the prompt before. One sequence only."""

    def __init__(self) -> None:
        self.calls, self.at = 0, 0.0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


def main() -> None:
    torch.set_num_threads(1)
    checkpoint, static = sys.argv[1], sys.argv[2:] == ["static"]
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    more = {"cache_implementation": "static"} if static else {}

    @torch.inference_mode()
    def decode(batch: Batch) -> Took:
        prompts = torch.tensor(batch.prompts)
        sampling = {"do_sample": True, "temperature": batch.temperature, "top_k": 0, "top_p": 1.0}
        if batch.temperature == 0:
            sampling = {"do_sample": False}
        options = dict(
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=batch.new,
            min_new_tokens=batch.new,
            pad_token_id=0,
            eos_token_id=None,
            **sampling,
            **more,
        )
        first = _First() if len(prompts) == 1 else None
        began = time.perf_counter()
        out = model.generate(prompts, streamer=first, **options)
        seconds = time.perf_counter() - began
        sampled = (out.shape[1] - prompts.shape[1]) * len(prompts)
        first_s = first.at - began if first else 0.0
        return Took(seconds, first_s, sampled, memory_mib())

    kind = "static cache" if static else "dynamic cache"
    serve(f"transformers {transformers.__version__} generate, float32, 1 thread, {kind}", decode)


if __name__ == "__main__":
    main()
