"""What a study checks before it trains anything: each stage by its own command with `--check`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from etude.study.config import BadStudy, StudyConfig, phase, written
from etude.study.scaling import Command, CommandFailed, loss_words, start_words


def require_possible(config: StudyConfig, command: Command) -> None:
    """Check both phases, the held-out tokens and the run, and write nothing. SFT is checked on the checkpoint that `cpt` starts
    from, because its own does not exist yet. Raises BadStudy with what each stage refuses."""
    with TemporaryDirectory(prefix="etude-study-") as name:
        folder = Path(name)
        cpt = phase(Path(config.cpt), out=folder / "cpt", tokens=config.levels[0])
        base = Path(str(cpt.get("checkpoint", "")))
        sft = phase(Path(config.sft), out=folder / "sft", checkpoint=base)
        stages = {}
        for stage, table in (("cpt", cpt), ("sft", sft)):
            file = folder / f"{stage}.toml"
            file.write_text(written(table))
            stages[stage] = ["train", stage, str(file)]
        stages["measure"] = loss_words(config.measure, base)
        stages["rl"] = start_words(config.rl)
        wrong = []
        for stage, words in stages.items():
            try:
                command([*words, "--check"], folder / "state")
            except CommandFailed as error:
                source = {"cpt": f" {config.cpt}", "sft": f" {config.sft}"}.get(stage, "")
                wrong.append(f"{stage}{source}: `etude {' '.join(words[:2])}` refuses it:\n{error.printed}")
                if stage == "cpt":
                    break  # the others are checked on its checkpoint
    if wrong:
        raise BadStudy("\n".join(wrong))
