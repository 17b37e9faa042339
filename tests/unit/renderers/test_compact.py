import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.environments.function.actions import Observation, Tool
from shared.environments.function.edits import apply_edit
from shared.problems import Case, FunctionProblem
from shared.problems.values import encode
from shared.renderers.formats.compact_1 import MAX_GOT, SPECIAL, Compact, FormatError

SOURCE = "def f(a, b):\n    if a < b:\n        return '<test>'\n    return a - b\n"
relaxed = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
code_text = st.text(st.sampled_from("abxyz01 <>=+-*/()[]:,._'\"é<test>"), max_size=24)


def problem(source: str = SOURCE) -> FunctionProblem:
    return FunctionProblem(
        id="p",
        files={"m.py": source},
        entry="f",
        visible=[Case(args=encode([1, "x"]), expected=encode((2,))), Case(args=encode([2, 3]), expected=encode(5))],
        actual=["TypeError", encode(5)],
    )


def test_a_prompt_shows_the_task_the_cases_and_what_the_broken_code_returned(compact: Compact) -> None:
    text = compact.text(compact.prompt(problem(), problem().files))
    assert text == (
        "<task><L1>def f(a, b):<L2><i1>if a < b:<L3><i2>return '<test>'<L4><i1>return a - b"
        "<tests><T1>1, 'x'<t>(2,)<got>TypeError<T2>2, 3<t>5<got><pass><end>"
    )


def test_text_of_a_file_never_becomes_a_special_token(compact: Compact) -> None:
    ids = compact.prompt(problem(), problem().files)
    assert compact.test not in ids
    assert all(i >= len(SPECIAL) for i in compact.encode("<L1><edit><end><submit>"))


def test_actual_results_are_shown_only_for_the_problems_own_files(compact: Compact) -> None:
    changed = {"m.py": SOURCE.replace("<", ">")}
    assert compact.got not in compact.prompt(problem(), changed)


def test_a_result_that_is_right_in_another_order_is_shown_as_a_pass(compact: Compact) -> None:
    case = Case(args="[1]", expected=encode({"a": 1, "b": 2}))
    one = msgspec.structs.replace(problem(), visible=[case], actual=[encode({"b": 2, "a": 1})])
    assert "<got><pass><end>" in compact.text(compact.prompt(one, one.files))


def test_a_summary_stands_in_the_prompt_as_it_was_sampled(compact: Compact) -> None:
    summary = (
        compact.line_token(1),
        *compact.encode(" <"),
        compact.got,
        *compact.encode(" >"),
        compact.end,
        compact.done,
    )
    ids = compact.prompt(problem(), problem().files, summary)
    assert tuple(ids[-len(summary) - 1 : -1]) == summary
    (action,) = compact.actions(list(summary))
    assert action.tool is Tool.summary
    assert action.text == "<L2> <<got> ><end>"


@relaxed
@given(before=code_text, after=code_text)
def test_an_edit_call_reads_back_and_turns_the_line_into_what_was_meant(
    compact: Compact, before: str, after: str
) -> None:
    before, after = before.strip(), after.strip()
    call = compact.edit_call(1, before, after)
    if before == after:
        assert call is None
        return
    assert call is not None
    action, submit = compact.actions([*call, compact.submit])
    assert (action.tool, action.error, submit.tool) == (Tool.edit, "", Tool.submit)
    files = apply_edit({"m.py": f"x\n    {before}\n"}, action)
    assert files == {"m.py": f"x\n    {after}\n"}


@relaxed
@given(st.lists(st.integers(min_value=0, max_value=1023), max_size=40))
def test_actions_never_raise_and_only_the_last_can_be_broken(compact: Compact, completion: list[int]) -> None:
    actions = compact.actions(completion)
    assert not any(a.error for a in actions[:-1])
    ends = [a.end for a in actions]
    assert ends == sorted(ends)
    assert all(a.start < a.end <= len(completion) for a in actions)


def test_broken_calls_say_what_is_wrong(compact: Compact) -> None:
    line, a = compact.line_token(0), compact.encode("a")
    cases = {
        "no end": [compact.edit, line, *a],
        "names no line": [compact.edit, *a, compact.got, compact.end],
        "no single <got>": [compact.edit, line, *a, compact.end],
        "special token": [compact.edit, line, compact.pad, compact.got, *a, compact.end],
        "no call begins here": [*a, compact.submit],
    }
    for reason, completion in cases.items():
        (action,) = compact.actions(completion)
        assert reason in action.error


def test_several_edits_and_undos_stand_in_one_generation(compact: Compact) -> None:
    edit = compact.edit_call(1, "a < b", "a > b")
    assert edit is not None
    tools = [a.tool for a in compact.actions([compact.undo, *edit, *edit, compact.test])]
    assert tools == [Tool.undo, Tool.edit, Tool.edit, Tool.test]


def test_observations_show_the_first_failure(compact: Compact) -> None:
    assert compact.text(compact.observation(Observation(Tool.test))) == "<obs><pass><end>"
    failing = Observation(Tool.test, failing=1, got=encode([1]))
    assert compact.text(compact.observation(failing)) == "<obs><T2>[1]<end>"
    assert compact.text(compact.observation(Observation(Tool.edit, error="no such line"))) == "<obs><broken><end>"


def test_long_values_are_cut_and_marked(compact: Compact) -> None:
    ids = compact.observation(Observation(Tool.test, failing=0, got=encode("ab" * 500)))
    assert len(ids) < 24
    assert compact.cut in ids


@relaxed
@given(text=st.text(alphabet="ab0 _(é中", min_size=1, max_size=40), times=st.integers(1, 400))
def test_of_a_long_value_no_more_is_read_than_is_shown(compact: Compact, text: str, times: int) -> None:
    around = len(compact.observation(Observation(Tool.test, failing=0)))
    shown = compact.observation(Observation(Tool.test, failing=0, got=text * times))
    whole = len(compact.encode(text * times))
    assert (compact.cut in shown) == (whole > MAX_GOT)
    assert len(shown) == around + min(whole, MAX_GOT + 1)


def test_a_problem_that_cannot_be_written_is_refused_with_the_limit(compact: Compact) -> None:
    with pytest.raises(FormatError, match="at most 48"):
        compact.prompt(problem("x = 1\n" * 60), {"m.py": "x = 1\n" * 60})
    with pytest.raises(FormatError, match="found 2 files"):
        compact.prompt(problem(), {"a.py": "", "b.py": ""})
    long = "y = " + "+".join("zqk" for _ in range(400))
    with pytest.raises(FormatError, match="the context holds 512"):
        compact.prompt(problem(long), {"m.py": long})


def test_a_checkpoint_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"found no etude\.json there"):
        Compact.load(tmp_path)
    (tmp_path / "etude.json").write_text(json.dumps({"format": "chatml", "context": 512}))
    with pytest.raises(FormatError, match="'chatml'"):
        Compact.load(tmp_path)
