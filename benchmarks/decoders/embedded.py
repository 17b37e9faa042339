"""Our embedded engine on a checkpoint: python -m benchmarks.decoders.embedded CHECKPOINT [DRAFTS]

DRAFTS: tokens that the MTP layer can propose per step (0, the default: none). Whether it does each batch says; all ways are ways of
one engine, for two processes of one program differ by some percent, by where their memory lies."""

from __future__ import annotations

import queue
import sys
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.decoders import Batch, Took, memory_mib, serve
from services.inference.engine import Engine
from services.inference.request import Request, Result
from shared.model import load_checkpoint

ROWS, POSITIONS = 64, 512


def main() -> None:
    torch.set_num_threads(1)
    model = load_checkpoint(Path(sys.argv[1])).eval().requires_grad_(False)
    drafts = int((sys.argv[2:] or ["0"])[0])
    engine = Engine(
        model,
        0,
        rows=ROWS,
        positions=POSITIONS,
        prefill_tokens=2048,
        queue_limit=1 << 20,
        draft_tokens=drafts,
    )
    engine.start()
    gate = engine.batch._gate

    def use(way: str) -> None:
        engine.batch.draft_tokens = 0 if way == "none" else drafts
        engine.batch._gate = gate if way == "gated" else None

    def decode(batch: Batch) -> Took:
        engine.call(lambda: use(batch.drafts)).result()
        engine.flush().result()  # every prompt is computed, none found
        ended: queue.SimpleQueue[Result] = queue.SimpleQueue()
        first: list[float] = []

        def watch() -> object:
            seen = False

            def progress(token: int, logprob: float, _serial: int) -> None:
                nonlocal seen
                if not seen:
                    seen = True
                    first.append(time.perf_counter())

            return progress

        requests = [
            Request(
                rid="",
                tokens_P=np.array(prompt, np.int32),
                max_new_tokens=batch.new,
                done=ended.put,
                temperature=batch.temperature,
                progress=watch(),  # type: ignore[arg-type]
            )
            for prompt in batch.prompts
        ]
        began = time.perf_counter()
        for request in requests:
            engine.submit(request)
        results = [ended.get() for _ in requests]
        seconds, tokens = time.perf_counter() - began, sum(len(r.tokens_C) for r in results)
        judged = sum(r.judged for r in results)
        note = f"{1 + sum(r.accepted for r in results) / judged:.2f} tokens per judging pass" if judged else ""
        return Took(seconds, max(first) - began, tokens, memory_mib(), note)

    serve(f"embedded engine, float32, 1 thread{f', at most {drafts} drafts by MTP' if drafts else ''}", decode)


if __name__ == "__main__":
    main()
