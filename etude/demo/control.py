"""The control: the same minutes spent on more supervised fine-tuning of the base policy, measured the same way."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from etude.demo import prepare, report
from etude.demo.options import DemoOptions
from etude.demo.prepare import DemoError


async def run_control(options: DemoOptions, console: Console) -> int:
    """Writes report.json with the same keys, `"control": "sft"`, and no ledger: nothing was requested."""
    from etude.evaluate import measure

    pack = options.pack or prepare.make_pack()
    out = options.state.resolve() / "control-sft"
    sizes = {
        "samples": options.eval_samples,
        "limit": options.eval_problems,
        "console": console,
        "retry": options.retry,
    }
    before = await measure(prepare.BASE, pack, "held_out", title="held-out, before", **sizes)
    shutil.rmtree(out, ignore_errors=True)  # of an earlier control
    done = await asyncio.to_thread(
        subprocess.run,
        [
            sys.executable, "-m", "services.trainer.base", "sft", "--from", str(prepare.BASE), "--pack", str(pack),
            "--minutes", str(options.minutes), "--seed", str(options.seed), "--out", str(out),
        ]
    )  # fmt: skip
    if done.returncode:
        raise DemoError(f"fine-tuning ended with exit code {done.returncode}; the lines above say why")
    after = await measure(out, pack, "held_out", title="held-out, after", **sizes)
    figures = {
        "control": "sft",
        "seed": options.seed,
        "minutes": options.minutes,
        "before": report.figures_of(before),
        "after": report.figures_of(after),
        "gain": {
            key: report.paired(before, after, field)
            for key, field in (("pass_at_1", "solved"), ("first_edit", "first_edit"))
        },
    }
    Path(options.report).write_text(json.dumps(figures, indent=2) + "\n")
    console.print(report.table(figures))
    return 0
