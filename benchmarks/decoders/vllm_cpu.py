"""vLLM on a CPU: python -m benchmarks.decoders.vllm_cpu CHECKPOINT

The offline engine (V1) in one process, float32, one thread, all prompts handed over at once; its compiled graph, not the eager
one. The checkpoint is written anew without its MTP layer, which vLLM does not know of Qwen3-MoE. Runs in an environment of its own
(`benchmarks.decode` makes it); its build of torch for CPUs is in no package registry, so it runs beside torch's ordinary one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

# vLLM and gloo print where answers are expected: what they say goes to standard error.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "0",  # one thread, on one core
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import safetensors.torch  # noqa: E402
import vllm  # noqa: E402

from benchmarks.decoders import Batch, Took, memory_mib, serve  # noqa: E402

SESSIONS, CONTEXT = 64, 512


def without_mtp(checkpoint: Path, out: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    layers = config["num_hidden_layers"]
    tensors = safetensors.torch.load_file(checkpoint / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"model.layers.{layers}.")}
    safetensors.torch.save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        without_mtp(Path(sys.argv[1]), Path(folder))
        engine = vllm.LLM(
            model=folder,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=CONTEXT,
            max_num_seqs=SESSIONS,
            enable_prefix_caching=False,  # every prompt is computed
            seed=1,
        )

    def decode(batch: Batch) -> Took:
        asked = [{"prompt_token_ids": prompt} for prompt in batch.prompts]
        how = vllm.SamplingParams(
            temperature=batch.temperature, max_tokens=batch.new, ignore_eos=True, detokenize=False
        )
        began = time.perf_counter()
        answers = engine.generate(asked, how, use_tqdm=False)
        seconds = time.perf_counter() - began
        return Took(seconds, 0.0, sum(len(answer.outputs[0].token_ids) for answer in answers), memory_mib())

    sys.stdout = ANSWERS
    serve(f"vLLM {vllm.__version__} for CPUs, float32, 1 thread", decode)


if __name__ == "__main__":
    main()
