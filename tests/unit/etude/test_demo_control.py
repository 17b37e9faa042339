"""`etude demo --control sft`: what it takes up of what was given, and what it refuses instead of ignoring it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etude.demo import prepare
from etude.demo.control import packs_of
from etude.demo.options import DemoOptions
from etude.demo.prepare import DemoError
from etude.demo.run import run
from shared.problems import pack as packs
from tests.end_to_end.problems import write


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"config": Path("mine.json")}, "--config: found mine.json beside --control sft"),
        ({"resume": True}, "--resume: found beside --control sft"),
    ],
)
def test_an_option_that_a_control_cannot_obey_is_refused_by_name(
    given: dict[str, Path | bool], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(DemoOptions(control="sft", state=tmp_path, **given)) == 1  # type: ignore[arg-type]
    assert capsys.readouterr().out.startswith(said)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("control", ["none", "sft"])
def test_where_the_report_cannot_be_written_nothing_is_begun(
    control: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").mkdir()
    state, place = tmp_path / "state", tmp_path / "taken"
    assert run(DemoOptions(control=control, state=state, report=place, base_port=0)) == 1
    assert "is a folder; give a file" in capsys.readouterr().out
    assert not list(state.glob("demo.json"))


def test_own_problems_are_measured_on_as_in_the_demo_and_taught_by_those_to_practise_on(tmp_path: Path) -> None:
    write(tmp_path / "mine.jsonl")
    measured, taught = packs_of(DemoOptions(problems=tmp_path / "mine.jsonl", state=tmp_path))
    expected = prepare.own_pack(tmp_path / "mine.jsonl", tmp_path / "as-the-demo")
    for name in ("held_out.public.jsonl.zst", "held_out.hidden.jsonl.zst", "rl.public.jsonl.zst"):
        assert (measured / name).read_bytes() == (expected / name).read_bytes()
    held_out = {p.id for p in packs.read_problems((measured / "held_out.public.jsonl.zst").read_bytes())}
    practice = {p.id for p in packs.read_problems((measured / "rl.public.jsonl.zst").read_bytes())}
    for split in ("train", "dev"):  # what services.trainer.base reads
        learned = {p.id for p in packs.read_problems((taught / f"{split}.public.jsonl.zst").read_bytes())}
        assert learned == practice
        assert not learned & held_out
    assert packs.decompress((taught / packs.PRETRAIN).read_bytes()) == b""


def test_problems_without_a_solution_teach_nothing_and_the_text_says_so(tmp_path: Path) -> None:
    write(tmp_path / "all.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    for line in lines[::2]:
        del line["solution"]
    own = tmp_path / "some.jsonl"
    own.write_text("\n".join(json.dumps(line) for line in lines))
    _, taught = packs_of(DemoOptions(problems=own, state=tmp_path))
    learned = {p.id for p in packs.read_problems((taught / "train.public.jsonl.zst").read_bytes())}
    assert learned
    assert learned <= {line["id"] for line in lines if "solution" in line}

    own.write_text("\n".join(json.dumps({k: v for k, v in line.items() if k != "solution"}) for line in lines))
    with pytest.raises(DemoError, match=r"some\.jsonl: found no field 'solution' in \d+ practice problems"):
        packs_of(DemoOptions(problems=own, state=tmp_path))
