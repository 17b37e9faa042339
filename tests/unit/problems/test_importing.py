"""Own problems: every bad line is named with its field, and what is exported can be imported."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import math
import unicodedata
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from shared.environments.function.runs import run_of
from shared.problems import ProblemError
from shared.problems.importing import import_jsonl, read_lines
from shared.problems.pack import export_line
from shared.problems.schema import MAX_CODE
from shared.problems.values import encode, equal
from shared.sandbox import CallResult, connect

GOOD: dict[str, Any] = {
    "id": "double-1",
    "prompt": "double must double",
    "files": {"double.py": "def double(x):\n    return x + x + 1\n"},
    "entry": "double",
    "visible": [{"args": "[2]", "expected": "4"}],
    "hidden": [{"args": "[0]", "expected": "0"}, {"args": '["ab"]', "expected": '"abab"'}],
    "solution": {"double.py": "def double(x):\n    return x + x\n"},
}
LONG = f"def double(x):\n    return x + x  # {'y' * MAX_CODE}\n"


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_a_good_file_is_read_in_its_order_and_what_is_exported_is_the_same_again(tmp_path: Path):
    pairs = import_jsonl(write(tmp_path / "a.jsonl", GOOD, "", {**GOOD, "id": "double-2"}))
    assert [problem.id for problem, _ in pairs] == ["double-1", "double-2"]
    again = import_jsonl(write(tmp_path / "b.jsonl", *(export_line(*pair) for pair in pairs)))
    assert again == pairs


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"id": ""}, "'id'"),
        ({"id": "with space"}, "'id'"),
        ({"files": None}, "files"),
        ({"files": {}}, "'entry'"),
        ({"entry": "triple"}, r"'files\[double.py\]'"),
        ({"entry": "other.py::double"}, "'entry'"),
        ({"visible": []}, "'visible'"),
        ({"visible": [{"args": "[2]"}]}, "expected"),
        ({"visible": [{"args": "2", "expected": "4"}]}, r"'visible\[0\]\.args'"),
        ({"hidden": []}, "'hidden'"),
        ({"hidden": [{"args": "[nonsense]", "expected": "4"}]}, r"'hidden\[0\]\.args'"),
        ({"hidden": [{"args": "[2]", "expected": 4}]}, "expected"),
        (
            {"hidden": [{"args": "[2]", "expected": "4", "changed": 1}]},
            r"'hidden\[0\]\.changed': found 1; allowed: true or false",
        ),
        (
            {"hidden": [{"args": "[2]", "expected": "4", "changed": True}]},
            r"'hidden\[0\]\.changed': found true with the expected value 4; allowed: a list, dict or set",
        ),
        ({"actual": ["1", "2"]}, "'actual'"),
        ({"solution": {"double.py": "x = 1"}}, r"'solution\[double.py\]'"),
        ({"solution": {"no.py": ""}}, "'solution'"),
        ({"files": {"double.py": LONG}}, r"'files': found 262,1\d\d characters of code; allowed: at most 262,144"),
        (
            {"solution": {"double.py": LONG}},
            r"'solution': found 262,1\d\d characters of code; allowed: at most 262,144",
        ),
        ({"limits": {"time_s": 0}}, "'limits'"),
        ({"limits": {"time_s": "long"}}, "time_s"),
        ({"limits": {"time_s": 601}}, "'limits': found time_s 601; allowed: above 0, at most 600"),
        ({"limits": {"memory_mb": 10**15}}, "'limits': found memory_mb 1000000000000000; allowed: 64 to 1048576"),
        ({"limits": {"memory_mb": 63}}, "'limits': found memory_mb 63"),
        ({"limits": {"call_s": 3}}, r"'limits': found call_s 3; allowed: above 0, at most time_s \(2\)"),
        ({"limits": {"call_s": 0}}, "'limits': found call_s 0"),
        ({"hidden": [{"args": "[2]", "expected": 4}]}, r"'hidden\[0\]\.expected': found 4; allowed: a text"),
        ({"hidden": [{"args": "[2]", "expected": "4"}, {"args": "[3]"}]}, r"'hidden\[1\].expected': is missing"),
        ({"files": {"double.py": 5}}, r"'files\[\.\.\.\]': found {'double.py': 5}; allowed: a text"),
        ({"id": 5 * [77777777777777777]}, r"'id': found \[7{17}[7, ]*…; allowed: a text"),
        ({"limts": {}}, "'limts': not known; did you mean 'limits'"),
        ({"limits": {"time": 1}}, r"'limits\.time': not known; did you mean 'limits\.time_s'"),
        ({"visible": [{"args": "[2]", "expected": "4", "kwargs": "{}"}]}, r"'visible\[0\]\.kwargs': not known"),
        ({"hidden": [{"args": "[2]", "expectd": "4"}]}, r"did you mean 'hidden\[0\]\.expected'"),
        ({"quite_another": 1}, "'quite_another': not known; allowed: id, kind, category"),
        ({"version": 2}, "'version': found 2; allowed: 1, or left out"),
        ({"version": True}, "'version': found True; allowed: 1, or left out"),
        (
            {"hidden": [{"args": "[2]", "expected": '{"int": "9007199254740993"}'}]},
            "tag 'int' holds '9007199254740993'",
        ),
        ({"kind": "riddle"}, "riddle"),
        ({"cell": "x" * 201}, r"'cell': found 'x{60}', 201 characters; allowed: at most 200, all printable"),
        ({"category": "a\0b"}, r"'category': found 'a\\x00b', 3 characters; allowed: at most 200, all printable"),
        ({"entry": "S.double"}, r"'entry': found 'S\.double'; allowed: .*; a function at the top level, no method"),
        (
            {"files": {"double.py": "class double:\n    pass\n"}},
            r"'files\[double\.py\]': defines no function 'double' at its top level, but a class of that name",
        ),
        ({"files": {"double.py": "async def double(x):\n    pass\n"}}, "but a coroutine of that name"),
        ({"files": {"double.py": "g = [double for double in ()]\ndef f(double):\n    double = 1\n"}}, "no function"),
        ({"kind": "repository"}, "'hidden': found .*; allowed for kind 'repository': an object with fail_to_pass"),
        ({"kind": "riddle"}, r"'kind': found 'riddle'; allowed: agent, function, repository"),
        ({"kind": 5}, r"'kind': found 5; allowed: agent, function, repository"),
    ],
)
def test_a_bad_field_is_named_with_its_line(tmp_path: Path, change: dict[str, Any], field: str):
    path = write(tmp_path / "bad.jsonl", GOOD, {**GOOD, "id": "other", **change})
    with pytest.raises(ProblemError, match=field) as caught:
        import_jsonl(path)
    assert "line 2: " in str(caught.value)
    assert "line 1: " not in str(caught.value)


def test_a_file_may_say_whether_a_value_is_returned_or_an_argument_changed(tmp_path: Path) -> None:
    cases = [{"args": "[[2, 1]]", "expected": "[1, 2]", "changed": changed} for changed in (True, False)]
    pair = import_jsonl(write(tmp_path / "a.jsonl", {**GOOD, "hidden": [*cases, {"args": "[2]", "expected": "4"}]}))[0]
    assert [case.changed for case in pair[1].cases] == [True, False, msgspec.UNSET]
    assert import_jsonl(write(tmp_path / "b.jsonl", export_line(*pair))) == [pair]
    assert msgspec.json.encode(pair[1].cases[2]) == b'{"args":"[2]","expected":"4"}', "the bytes of older packs"


@pytest.mark.parametrize(
    "code",
    [
        "from typing import Callable\n\ndouble: Callable[[int], int] = lambda x: x + x\n",
        "try:\n    import numpy\nexcept ImportError:\n    def double(x):\n        return x + x\n",
        "if True:\n    def double(x):\n        return x + x\nelse:\n    double = None\n",
        "double, half = (lambda x: x + x), None\n",
        "long = " + "1 + " * 900 + "1\ndef double(x):\n    return x + x\n",
    ],
)
def test_a_function_may_be_bound_by_any_statement_of_its_module(tmp_path: Path, code: str) -> None:
    changed = {**GOOD, "solution": {"double.py": code}}
    ((_, hidden),) = import_jsonl(write(tmp_path / "a.jsonl", changed))
    assert hidden.solution == {"double.py": code}


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_a_name_is_the_one_that_python_reads(tmp_path: Path, form: Literal["NFC", "NFD"]) -> None:
    code = {"f.py": unicodedata.normalize("NFC", "def größe(µ):\n    return µ\n")}
    entry = unicodedata.normalize(form, "größe")
    ((problem, _),) = import_jsonl(write(tmp_path / "a.jsonl", {**GOOD, "files": code, "solution": {}, "entry": entry}))
    functions = connect("process", 1)
    try:
        run = run_of(problem, problem.files, problem.visible, stop_at_error=True)
        assert functions.run_sync([run]) == [[CallResult("2")]]
    finally:
        functions.close_sync()


def test_code_loses_its_mark_of_the_byte_order_as_a_file_does(tmp_path: Path) -> None:
    marked = {field: {name: "\ufeff" + text for name, text in GOOD[field].items()} for field in ("files", "solution")}
    assert import_jsonl(write(tmp_path / "a.jsonl", {**GOOD, **marked})) == import_jsonl(
        write(tmp_path / "b.jsonl", GOOD)
    )


def test_all_bad_lines_are_named_at_once_and_a_repeated_id_too(tmp_path: Path):
    with pytest.raises(ProblemError) as caught:
        import_jsonl(write(tmp_path / "bad.jsonl", GOOD, "{", GOOD, "[]"))
    text = str(caught.value)
    assert "line 2: " in text
    assert "line 3: field 'id': 'double-1' stands on line 1 as well" in text
    assert "line 4: found []; allowed: one JSON object a line" in text


DEEP = {
    "a long sum": "def double(x):\n    return " + "1+" * 50_000 + "1\n",
    "many signs": "def double(x):\n    return " + "-" * 100_000 + "1\n",
}


@pytest.mark.parametrize("kind", DEEP)
def test_code_that_python_cannot_hold_is_refused_with_its_line(tmp_path: Path, kind: str) -> None:
    for field in ("files", "solution"):
        path = write(tmp_path / "deep.jsonl", GOOD, {**GOOD, "id": "deep", field: {"double.py": DEEP[kind]}})
        with pytest.raises(ProblemError, match=rf"line 2: field '{field}\[double\.py\]': is nested too deeply"):
            import_jsonl(path)


@pytest.mark.parametrize(
    ("before", "again", "named"),
    [
        ("{", '"visible": [], ', "visible"),
        ('"files": {', '"double.py": "", ', r"double\.py"),
        ("[{", '"args": "", ', "args"),
    ],
)
def test_a_field_that_stands_twice_is_refused_for_nobody_knows_which_is_meant(
    tmp_path: Path, before: str, again: str, named: str
) -> None:
    twice = json.dumps(GOOD).replace(before, before + again, 1)
    with pytest.raises(ProblemError, match=rf"line 2: field '{named}' stands twice in one object"):
        import_jsonl(write(tmp_path / "twice.jsonl", {**GOOD, "id": "first"}, twice))


def test_json_that_is_nested_too_deeply_is_refused_with_its_line(tmp_path: Path) -> None:
    deep = '{"id": ' + "[" * 100_000 + "]" * 100_000 + "}"
    with pytest.raises(ProblemError, match="line 2: the JSON is nested too deeply"):
        import_jsonl(write(tmp_path / "deep.jsonl", GOOD, deep))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("9007199254740993", 9007199254740993),
        ('{"tuple": [9007199254740993]}', (9007199254740993,)),
        ('{"float": "NaN"}', math.nan),
        ('{"float": "Infinity"}', math.inf),
        ('{"float": "+inf"}', math.inf),
        ('{"float": "1.5"}', 1.5),
        ("1e999", math.inf),
        ("1E2", 100.0),
        ('{"bytes": "AB"}', b"\xab"),
        ('{"bytes": "61 62"}', b"ab"),
        ('{"int": "0x5"}', 5),
        ('{"int": "0X1F"}', 31),
        ('{"str": [97]}', "a"),
        ('{"set": [2, 1]}', {1, 2}),
        ('{"dict":[["b",[]],["a",null]]}', {"b": [], "a": None}),
    ],
)
def test_however_a_value_is_written_what_returns_it_is_right(tmp_path: Path, text: str, value: object) -> None:
    case = {"args": f"[{text}]", "expected": text}
    ((problem, hidden),) = import_jsonl(write(tmp_path / "a.jsonl", {**GOOD, "visible": [case], "hidden": [case]}))
    for found in (*problem.visible, *hidden.cases):
        assert equal(encode(value), found.expected)
        assert found.args == encode([value])


def test_the_versions_number_may_be_said(tmp_path: Path) -> None:
    assert import_jsonl(write(tmp_path / "a.jsonl", {**GOOD, "version": 1})) == import_jsonl(
        write(tmp_path / "b.jsonl", GOOD)
    )


def test_the_greatest_limits_are_taken(tmp_path: Path) -> None:
    greatest = {"time_s": 600, "call_s": 600, "memory_mb": 1 << 20}
    ((problem, _),) = import_jsonl(write(tmp_path / "a.jsonl", {**GOOD, "limits": greatest}))
    run = run_of(problem, problem.files, problem.visible, stop_at_error=True)
    functions = connect("process", 1)
    try:
        assert functions.run_sync([run]) == [[CallResult("5")]]
    finally:
        functions.close_sync()


def test_who_leaves_the_limit_of_a_call_out_has_the_bytes_of_before(tmp_path: Path) -> None:
    ((problem, _),) = import_jsonl(write(tmp_path / "a.jsonl", {**GOOD, "limits": {"time_s": 3}}))
    assert msgspec.json.encode(problem.limits) == b'{"time_s":3.0,"memory_mb":512}'
    ((problem, _),) = import_jsonl(write(tmp_path / "b.jsonl", {**GOOD, "limits": {"call_s": 1}}))
    assert msgspec.json.encode(problem.limits) == b'{"time_s":2.0,"memory_mb":512,"call_s":1.0}'


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (json.dumps(GOOD).encode("utf-16"), "found bytes that are 0, as in UTF-16; allowed: text in UTF-8"),
        (json.dumps(GOOD).encode("utf-16-le"), "found bytes that are 0, as in UTF-16; allowed: text in UTF-8"),
        (f"{json.dumps(GOOD)}\n".encode() + b'"\xe4"', "line 2: found 0xe4; allowed: text in UTF-8"),
        (json.dumps([GOOD, GOOD], indent=1).encode(), "found a JSON array; allowed: one JSON object a line"),
        (json.dumps([GOOD]).encode(), "found a JSON array; allowed: one JSON object a line"),
        (
            json.dumps(GOOD, indent=1).encode(),
            "found JSON objects over several lines; allowed: one JSON object a line",
        ),
        (
            2 * json.dumps(GOOD, indent=1).encode(),
            "found JSON objects over several lines; allowed: one JSON object a line",
        ),
        (gzip.compress(json.dumps(GOOD).encode()), "found a compressed file; allowed: one JSON object a line"),
        (zstandard.compress(json.dumps(GOOD).encode()), "as `unzstd` unpacks it"),
        (lzma.compress(json.dumps(GOOD).encode()), "as `unxz` unpacks it"),
        (bz2.compress(json.dumps(GOOD).encode()), "as `bunzip2` unpacks it"),
    ],
)
def test_another_kind_of_file_is_told_in_one_line_what_is_wanted(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "other.jsonl").write_bytes(data)
    with pytest.raises(ProblemError) as caught:
        import_jsonl(tmp_path / "other.jsonl")
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str):
    with pytest.raises(ProblemError, match="no problems in it"):
        import_jsonl(write(tmp_path / "empty.jsonl", text))


def test_a_missing_file_and_another_kind_of_file_are_refused_by_name(tmp_path: Path):
    with pytest.raises(ProblemError, match=r"none\.jsonl"):
        import_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(ProblemError, match=r"found a folder; allowed: .*; a pack is taken by --pack"):
        import_jsonl(tmp_path)
    (tmp_path / "image.jsonl").write_bytes(b"\x89PNG\xff")
    with pytest.raises(ProblemError, match=r"image\.jsonl"):
        import_jsonl(tmp_path / "image.jsonl")


ENDS = ["\u2028", "\u2029", "\u0085", "\x1c", "\x0b", "\x0c"]  # where str.splitlines breaks a line


def noted(name: str, note: str) -> dict[str, Any]:
    """`note` stands in its code and in a case."""
    code = {"double.py": f"def double(x):\n    return {note!r}\n"}
    return {**GOOD, "id": name, "files": code, "hidden": [{"args": "[2]", "expected": json.dumps(note)}]}


@given(
    notes=st.lists(
        st.lists(st.sampled_from([*ENDS, "a", "\ufeff", "ä"])).map("".join) | st.text(st.characters(codec="utf-8")),
        min_size=1,
    ),
    end=st.sampled_from(["\n", "\r\n"]),
    mark=st.booleans(),
    escaped=st.booleans(),
)
def test_every_problem_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, notes: list[str], end: str, mark: bool, escaped: bool
) -> None:
    path = tmp_path_factory.mktemp("own") / "own.jsonl"
    rows = [noted(f"p{i}", note) for i, note in enumerate(notes)]
    text = "".join(json.dumps(each, ensure_ascii=escaped) + end for each in rows)
    path.write_bytes(text.encode("utf-8-sig" if mark else "utf-8"))
    read = read_lines(path)
    assert [line.number for line in read] == list(range(1, len(notes) + 1))
    assert [line.problem.files for line in read] == [each["files"] for each in rows]
    assert [json.loads(line.hidden.cases[0].expected) for line in read] == notes


SWE = {"instance_id": "a__b-1", "repo": "a/b", "base_commit": "0", "patch": "", "test_patch": "", "version": "4.3"}
SMITH = {"instance_id": "a__b.1", "repo": "swesmith/a__b.1", "patch": "", "FAIL_TO_PASS": [], "PASS_TO_PASS": []}
R2E = {"parsed_commit_content": "{}", "execution_result_content": "{}", "expected_output_json": "{}"}


@pytest.mark.parametrize(
    ("row", "name", "source"),
    [
        (SWE, "SWE-bench", "swe-bench"),
        ({"instance": SWE}, "SWE-bench", "swe-bench"),
        (SMITH, "SWE-smith", "swe-smith"),
        (R2E, "R2E-Gym", "r2e-gym"),
    ],
)
@pytest.mark.parametrize("array", [False, True])
def test_rows_of_another_data_set_are_named_with_the_command_that_reads_them(
    tmp_path: Path, row: dict[str, Any], name: str, source: str, array: bool
) -> None:
    path = write(tmp_path / "rows.jsonl", json.dumps([row]) if array else row, *([] if array else [row]))
    with pytest.raises(ProblemError, match=f"found rows of {name}") as caught:
        import_jsonl(path)
    assert f"`etude tasks import {source} {path} --repos FOLDER_OF_CLONES --out PACK`" in str(caught.value)
    assert "version" not in str(caught.value)


def test_a_folder_of_harbor_tasks_and_a_parquet_file_are_named(tmp_path: Path) -> None:
    task = tmp_path / "tasks" / "one"
    task.mkdir(parents=True)
    (task / "task.toml").write_text("")
    for folder in (task, task.parent):
        with pytest.raises(
            ProblemError, match=rf"found Harbor tasks; .*`etude tasks import harbor {folder} --out PACK`"
        ):
            import_jsonl(folder)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1\0\0")
    with pytest.raises(ProblemError, match=r"found a Parquet file; .*to_json"):
        import_jsonl(tmp_path / "rows.parquet")
