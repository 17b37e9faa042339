"""`etude rollout run` and `show`: one attempt by hand, with every kind of policy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from rich.console import Console
from typer.testing import CliRunner, Result

from services.rollout.byhand import kept
from services.rollout.byhand.builtin import builtin
from services.rollout.byhand.policies import Wish
from services.rollout.byhand.scripted import BadScript, CallSaid, Reply, read_script, written
from services.rollout.cli import _run, app
from services.rollout.config import RolloutSettings
from shared import ledger
from shared import objects as stores
from shared.contracts.graded import Finding, Graded, verdict_key
from shared.contracts.messages import AttemptKey, Verdict
from shared.contracts.run import RunConfig, Sampling
from shared.contracts.trajectory import pack as pack_trajectory
from shared.problems.importing import import_jsonl
from shared.problems.pack import file_name, keep_trees, write
from shared.renderers.registry import load_renderer
from shared.sandbox import bubblewrap
from shared.settings import read
from shared.weights.checkpoint_objects import upload_directory
from tests.contract.sandboxes import NO_BWRAP
from tests.integration.test_foreign_agent import AGENT

BASE = Path(__file__).parents[2] / "etude" / "data" / "base"
BROKEN, REPAIRED = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
PROBLEM = {
    "id": "add-1",
    "files": {"m.py": BROKEN},
    "entry": "add",
    "visible": [{"args": "[1, 2]", "expected": "3"}],
    "hidden": [{"args": "[5, 7]", "expected": "12"}],
    "solution": {"m.py": REPAIRED},
}
EDIT = {"name": "edit", "arguments": {"line": 2, "old": "-", "new": "+"}}
REPLIES: list[dict[str, Any]] = [
    {"text": "<think>\nIt subtracts.\n</think>\nI test first.", "calls": [{"name": "test"}]},
    {"calls": [EDIT, {"name": "test"}]},
    {"text": "Done \x1b[31m.", "calls": [{"name": "submit"}]},
]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps(PROBLEM) + "\n" + json.dumps({**PROBLEM, "id": "add-2"}) + "\n")
    return path


def cli(tmp_path: Path, *words: object, sandbox: str = "process", **environment: str) -> Result:
    state = ["--state", str(tmp_path / "state")]
    return CliRunner().invoke(
        app, [*map(str, words), *state], env={"ETUDE_SANDBOX": sandbox, "COLUMNS": "120", **environment}
    )


def script(tmp_path: Path, replies: list[dict[str, Any]]) -> Path:
    path = tmp_path / "replies.json"
    path.write_text(json.dumps(replies))
    return path


def made(tmp_path: Path, result: Result) -> tuple[dict[str, Any], kept.Kept]:
    """What `run --json` printed, and the attempt as it is kept."""
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    return record, kept.load(tmp_path / "state" / "attempts", record["id"])


@contextlib.contextmanager
def serving(routes: dict[str, Handler]) -> Iterator[str]:
    """An HTTP server in a thread of its own."""
    loop = asyncio.new_event_loop()
    application = web.Application()
    for path, handler in routes.items():
        application.router.add_route("*", path, handler)
    runner = web.AppRunner(application, shutdown_timeout=0.1)

    async def start() -> str:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    url = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield url
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


# Scripts


def test_a_scripted_attempt_at_a_function_is_played_graded_kept_and_shown(tmp_path: Path, problems: Path) -> None:
    run = cli(tmp_path, "run", f"{problems}#add-2", "--scripted", script(tmp_path, REPLIES), "--json")
    record, attempt = made(tmp_path, run)
    solved = {
        "solved": True,
        "passed": 2,
        "total": 2,
        "first_edit_solved": True,
        "error": "",
        "notes": [],
        "failed": [],
    }
    assert record["verdict"] == solved
    assert (record["stop"], record["effort"]["turns"], record["trainable"]) == ("submitted", 3, False)
    assert "holds no training data" in run.stderr
    assert not any(segment.loss_mask.any() for segment in attempt.trajectory.segments)
    shown = cli(tmp_path, "show", record["id"]).stdout
    for line in (
        "It subtracts.",
        "● edit(line=2,",
        "+    return a + b",
        "-    return a - b",
        "All visible tests pass.",
    ):
        assert line in shown
    assert "submitted; solved: 2 of 2 tests passed" in shown
    assert "\x1b[31m" not in shown + run.stderr
    assert "Done ⟨ESC⟩[31m." in shown
    tokens = cli(tmp_path, "show", record["id"][-4:], "--tokens").stdout
    assert "<|im_start|>assistant" in tokens
    assert "it has no log-probabilities" in tokens
    listed = cli(tmp_path, "show").stdout
    assert record["id"] in listed
    assert json.loads(cli(tmp_path, "show", record["id"], "--json").stdout)["turns"][1]["calls"][0]["name"] == "edit"


def test_a_script_that_ends_early_submits_the_work_as_it_is(tmp_path: Path, problems: Path) -> None:
    run = cli(tmp_path, "run", problems, "--scripted", script(tmp_path, REPLIES[:1]), "--json")
    record, _ = made(tmp_path, run)
    assert (record["stop"], record["verdict"]["solved"]) == ("turn_limit", False)
    assert "the first of 2 problems" in run.stderr
    lines = run.stderr.splitlines()
    assert "turn 1: waiting for the policy" in lines  # a file has no line that is replaced
    assert "grading" in lines
    failed = record["verdict"]["failed"]
    assert failed
    shown = cli(tmp_path, "show", record["id"]).stdout
    for name in failed:
        assert f"  not passed: {name}" in lines
        assert f"not passed: {name}" in shown


def test_a_script_is_written_in_the_chat_format_of_a_checkpoint(tmp_path: Path, problems: Path) -> None:
    run = cli(tmp_path, "run", problems, "--scripted", script(tmp_path, REPLIES), "--checkpoint", BASE, "--json")
    record, attempt = made(tmp_path, run)
    assert (record["format"], record["verdict"]["solved"]) == ("compact-1", True)
    text = attempt.renderer.text(attempt.trajectory.segments[0].tokens.tolist())
    assert "<edit><L2>-<got>+<end><test>" in text.replace("\n", "")


def test_an_attempt_at_a_pack_without_its_hidden_part_is_not_graded(tmp_path: Path, problems: Path) -> None:
    ((problem, _), *_) = import_jsonl(problems)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / file_name("rl", "public")).write_bytes(write([problem]))
    run = cli(tmp_path, "run", f"{tmp_path / 'pack'}#add-1", "--scripted", script(tmp_path, REPLIES), "--json")
    record, _ = made(tmp_path, run)
    assert (record["verdict"], record["ungraded"]) == (None, "the hidden part of the problem does not lie beside it")


def repository(tmp_path: Path) -> Path:
    """A pack with one repository problem, made of a line that names its tree by a path."""
    (tmp_path / "tree" / "tests").mkdir(parents=True)
    (tmp_path / "tree" / "calc.py").write_text(BROKEN)
    (tmp_path / "tree" / "tests" / "test_calc.py").write_text(
        "from calc import add\n\n\ndef test_zero():\n    assert add(0, 0) == 0\n"
    )
    test = "from calc import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n"
    secret = {"fail_to_pass": ["tests/test_hidden.py::test_add"], "tests": {"tests/test_hidden.py": test}}
    line = {"id": "calc", "kind": "repository", "prompt": "add subtracts.", "tree": "tree", "hidden": secret}
    (tmp_path / "repository.jsonl").write_text(json.dumps(line) + "\n")
    objects = stores.connect(f"file:{tmp_path / 'objects'}")
    ((problem, hidden),) = import_jsonl(tmp_path / "repository.jsonl", objects)
    folder = tmp_path / "pack"
    folder.mkdir()
    keep_trees([problem], objects, folder)
    (folder / file_name("rl", "public")).write_bytes(write([problem]))
    (folder / file_name("rl", "hidden")).write_bytes(write([hidden]))
    return folder


@pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)
@pytest.mark.parametrize("named", ["pack#calc", "repository.jsonl"])
def test_a_scripted_attempt_at_a_repository_runs_real_tools(tmp_path: Path, named: str) -> None:
    repository(tmp_path)
    replies: list[dict[str, Any]] = [
        {"calls": [{"name": "list"}, {"name": "raed", "arguments": {"path": "calc.py"}}]},
        {"calls": [{"name": "edit", "arguments": {"path": "calc.py", "old": "a - b", "new": "a + b"}}]},
        {"calls": [{"name": "shell", "arguments": {"command": "python -c 'import calc; print(calc.add(1, 2))'"}}]},
        {"calls": [{"name": "submit"}]},
    ]
    words = ("run", tmp_path / named, "--scripted", script(tmp_path, replies), "--json")
    record, attempt = made(tmp_path, cli(tmp_path, *words, sandbox="bubblewrap"))
    assert record["verdict"]["solved"]
    assert record["effort"]["broken_tool_calls"] == 1
    assert [result.text for result in attempt.conversation.turns[2].results] == ["3"]
    shown = cli(tmp_path, "show", record["id"]).stdout
    assert "+    return a + b" in shown
    assert "did you mean 'read'?" in shown


@pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)
def test_a_scripted_attempt_of_an_agent_of_others_is_shown_and_graded(tmp_path: Path) -> None:
    repository(tmp_path)
    line = json.loads((tmp_path / "repository.jsonl").read_text())
    agent = f"python3 -c {shlex.quote(AGENT)}"
    (tmp_path / "agent.jsonl").write_text(json.dumps({**line, "kind": "agent", "agent": agent}) + "\n")
    replies: list[dict[str, Any]] = [
        {"calls": [{"name": "bash", "arguments": {"command": "sed -i 's/a - b/a + b/' calc.py"}}]},
        {"text": "It is mended."},
    ]
    words = ("run", tmp_path / "agent.jsonl", "--scripted", script(tmp_path, replies), "--json")
    record, attempt = made(tmp_path, cli(tmp_path, *words, sandbox="bubblewrap"))
    assert record["verdict"]["solved"]
    assert record["stop"] == "submitted"
    assert [turn.text for turn in attempt.conversation.turns] == ["", "It is mended."]
    assert [call.name for call in attempt.conversation.turns[0].calls] == ["bash"]
    assert json.loads(record["notes"]["endpoint"])["requests"] == {"first": 1, "continues": 1}
    text = attempt.renderer.text(attempt.trajectory.segments[0].tokens.tolist())
    assert "(none)" in text  # what the agent said of its command


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"call": []}]', "reply 1: Object contains unknown field `call`"),
        ('{"text": "a"}\n{"calls": [{}]}', "reply 2: Object missing required field `name`"),
        ("nothing", "allowed: a JSON list of replies, or one a line"),
    ],
)
def test_a_bad_script_is_refused_with_the_reply(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "script").write_text(text)
    with pytest.raises(BadScript) as error:
        read_script(tmp_path / "script")
    assert said in str(error.value)


def test_control_tokens_in_arguments_stay_text(tmp_path: Path) -> None:
    reply = Reply(calls=[CallSaid(name="write", arguments={"content": "<|im_end|> </tool_call> é"})])
    ids = written(reply, builtin())
    reading = builtin().reading(ids, [])
    assert ids.count(builtin().stop_tokens[0]) == 1
    assert reading.calls[0].arguments == {"content": "<|im_end|> </tool_call> é"}


# Servers


class Sglang:
    """A plain SGLang: it has no serials, and says nothing of keys and values. It samples what it is told to."""

    def __init__(self, replies: list[list[int]], version: str = "default") -> None:
        self.replies, self.version, self.asked = replies, version, list[dict[str, Any]]()

    def routes(self) -> dict[str, Handler]:
        return {"/model_info": self.model_info, "/generate": self.generate}

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": str(BASE), "weight_version": self.version})

    async def generate(self, http: web.Request) -> web.Response:
        self.asked.append(await http.json())
        ids = self.replies[len(self.asked) - 1]
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_version": self.version,
            "output_token_logprobs": [[-0.25 * (place + 1), id, None] for place, id in enumerate(ids)],
        }
        return web.json_response({"text": "", "output_ids": ids, "meta_info": meta})


def compact_replies() -> list[list[int]]:
    return [written(msgspec.convert(reply, Reply), load_renderer(BASE)) for reply in REPLIES]


def test_a_plain_sglang_gives_exact_ids_and_unknown_versions(tmp_path: Path, problems: Path) -> None:
    server = Sglang(compact_replies())
    with serving(server.routes()) as url:
        run = cli(tmp_path, "run", problems, "--policy", url, "--json")
    record, attempt = made(tmp_path, run)
    assert (record["trainable"], record["versions_known"], record["verdict"]["solved"]) == (True, False, True)
    assert "The policy version is unknown" in run.stderr
    (segment,) = attempt.trajectory.segments
    assert segment.tokens[segment.loss_mask].tolist() == [id for reply in compact_replies() for id in reply]
    expected = [-0.25 * (place + 1) for reply in compact_replies() for place in range(len(reply))]
    assert np.array_equal(segment.logprobs[segment.loss_mask], np.array(expected, np.float32))
    assert set(segment.versions[segment.loss_mask].tolist()) == {0}
    assert server.asked[1]["input_ids"] == segment.tokens[: len(server.asked[1]["input_ids"])].tolist()
    assert "unknown, recorded as 0" in cli(tmp_path, "show", record["id"]).stdout
    tokens = cli(tmp_path, "show", record["id"], "--tokens").stdout
    assert "mean log-probability" in tokens
    assert "<edit><L2>-<got>+<end><test>" in tokens


def test_a_server_without_a_directory_here_needs_a_checkpoint(tmp_path: Path, problems: Path) -> None:
    async def model_info(_: web.Request) -> web.Response:
        return web.json_response({"model_path": "Qwen/Qwen3-4B", "weight_version": "default"})

    with serving({"/model_info": model_info}) as url:
        run = cli(tmp_path, "run", problems, "--policy", url)
    assert run.exit_code == 2
    assert "'Qwen/Qwen3-4B' is not on this machine; allowed: --checkpoint DIRECTORY" in run.stderr


def message(text: str = "", *calls: tuple[str, str], **more: Any) -> dict[str, Any]:
    made = [
        {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": text or None, **({"tool_calls": made} if made else {}), **more}


class Chat:
    """An OpenAI-compatible endpoint that says what it is told to. The first request is too many."""

    def __init__(self, replies: list[dict[str, Any]]) -> None:
        self.replies, self.asked, self.keys = replies, list[dict[str, Any]](), set[str]()

    def routes(self) -> dict[str, Handler]:
        return {"/v1/models": self.models, "/v1/chat/completions": self.completions}

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "some-model"}]})

    async def completions(self, http: web.Request) -> web.Response:
        self.keys.add(http.headers.get("Authorization", ""))
        self.asked.append(await http.json())
        if len(self.asked) == 1:
            return web.json_response({"error": "slow down"}, status=429, headers={"Retry-After": "0.1"})
        reply = self.replies[len(self.asked) - 2]
        return web.json_response({"choices": [{"message": reply, "finish_reason": "stop"}]})


def test_a_chat_endpoint_works_in_messages_and_yields_no_training_data(tmp_path: Path, problems: Path) -> None:
    chat = Chat(
        [
            message("Let me see.", ("test", "{}"), ("edit", '{"line": 2'), reasoning_content="It subtracts."),
            message("No call."),
            message("", ("edit", json.dumps(EDIT["arguments"])), ("test", "")),
            message("", ("submit", "{}")),
        ]
    )
    with serving(chat.routes()) as url:
        run = cli(tmp_path, "run", problems, "--policy", f"{url}/v1", "--json", OPENAI_API_KEY="secret")
    record, attempt = made(tmp_path, run)
    assert record["verdict"]["solved"]
    assert (record["trainable"], record["policy"]) == (False, f"some-model at {url}/v1")
    assert "without exact token ids, so the trajectory holds no training data" in run.stderr
    assert chat.keys == {"Bearer secret"}
    first, last = chat.asked[0], chat.asked[-1]
    assert [tool["function"]["name"] for tool in first["tools"]] == ["edit", "undo", "test", "submit"]
    assert [sent["role"] for sent in first["messages"]] == ["system", "user"]
    roles = [sent["role"] for sent in last["messages"][2:]]
    assert roles == ["assistant", "tool", "tool", "assistant", "user", "assistant", "tool", "tool"]
    assert last["messages"][3]["tool_call_id"] == "c0"
    assert "no JSON" in last["messages"][4]["content"]
    assert "secret" not in run.stderr + run.stdout
    turns = attempt.conversation.turns
    assert (turns[0].thinking, turns[0].text, len(turns)) == ("It subtracts.", "Let me see.", 4)
    assert not any(segment.loss_mask.any() for segment in attempt.trajectory.segments)
    assert {span.role for span in attempt.trajectory.segments[0].spans} >= {"tool_call", "final", "tool_output"}


def test_a_policy_that_fails_in_mid_attempt_leaves_what_was_said(tmp_path: Path, problems: Path) -> None:
    server = Sglang(compact_replies()[:1])  # the second request breaks it

    async def generate(http: web.Request) -> web.Response:
        if len(server.asked) == 1:
            return web.Response(status=400, text="no such token")
        return await server.generate(http)

    with serving({**server.routes(), "/generate": generate}) as url:
        run = cli(tmp_path, "run", problems, "--policy", url, "--json")
    assert run.exit_code == 1
    record = json.loads(run.stdout)
    assert record["stop"] == "infrastructure"
    assert "no such token" in record["error"]
    assert "add(1, 2) gave -1" in cli(tmp_path, "show", record["id"]).stdout


def test_ctrl_c_submits_the_work_as_it_is(tmp_path: Path, problems: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio turns the signal into a cancellation of the command's task."""
    monkeypatch.setenv("ETUDE_SANDBOX", "process")
    server, waiting, over = Sglang(compact_replies()), threading.Event(), threading.Event()

    async def generate(http: web.Request) -> web.StreamResponse:
        if len(server.asked) == 2:
            waiting.set()
            while not over.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return await server.generate(http)

    async def interrupted(url: str) -> kept.Record:
        settings = read(RolloutSettings, state=tmp_path / "state")
        command = _run(str(problems), Wish(url), Sampling(), settings, Console(quiet=True))
        running = asyncio.create_task(command)
        assert await asyncio.to_thread(waiting.wait, 60)
        running.cancel()
        return await running

    with serving({**server.routes(), "/generate": generate}) as url:
        record = asyncio.run(interrupted(url))
        over.set()
    assert record.verdict is not None
    assert (record.stop, record.verdict.solved, record.effort.edits) == ("deadline", True, 1)


# Export


def exported(tmp_path: Path, id: str) -> dict[str, Any]:
    """The document, valid by the format's own package where that is installed."""
    done = cli(tmp_path, "export", id, "--atif", tmp_path / "atif.json")
    assert done.exit_code == 0, done.stderr
    document: dict[str, Any] = json.loads((tmp_path / "atif.json").read_text())
    with contextlib.suppress(ImportError):
        from atif import Trajectory

        assert Trajectory.model_validate(document).schema_version == "ATIF-v1.8"
    return document


def test_an_attempt_without_training_data_is_exported_as_text(tmp_path: Path, problems: Path) -> None:
    run = cli(tmp_path, "run", problems, "--scripted", script(tmp_path, REPLIES), "--json")
    document = exported(tmp_path, made(tmp_path, run)[0]["id"])
    assert [step["source"] for step in document["steps"]] == ["system", "user", "agent", "agent", "agent"]
    turn = document["steps"][3]
    assert [call["function_name"] for call in turn["tool_calls"]] == ["edit", "test"]
    assert turn["observation"]["results"][1]["source_call_id"] == turn["tool_calls"][1]["tool_call_id"]
    assert document["extra"]["solved"] is True
    assert not any("metrics" in step for step in document["steps"])


def test_a_sampled_attempt_is_exported_with_its_ids(tmp_path: Path, problems: Path) -> None:
    pytest.importorskip("shared.contracts.atif")
    with serving(Sglang(compact_replies()).routes()) as url:
        record, _ = made(tmp_path, cli(tmp_path, "run", problems, "--policy", url, "--json"))
    document = exported(tmp_path, record["id"])
    sampled = [step["metrics"]["completion_token_ids"] for step in document["steps"] if step["source"] == "agent"]
    assert sampled == compact_replies()


# An attempt of a run


def score(path: Path, *, reward: float, terms: dict[str, float]) -> None:
    """A ledger that knows the attempt's score alone."""
    engine = ledger.connect(f"sqlite:///{path}")
    ledger.upgrade(engine)
    engine.dispose()
    row = ("r-1", "a-1", 0, reward, 1, "{}", json.dumps(terms), "default", 0)
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("insert into verdicts values (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        database.commit()


def test_an_attempt_of_a_run_is_read_from_the_object_store(tmp_path: Path, problems: Path) -> None:
    with serving(Sglang(compact_replies(), version="7").routes()) as url:
        _, attempt = made(tmp_path, cli(tmp_path, "run", problems, "--policy", url, "--json"))
    objects = stores.connect(f"file:{tmp_path / 'state' / 'objects'}")
    base = upload_directory(objects, "runs/r-1/base", BASE, weights=False)
    pairs = import_jsonl(problems)
    public = objects.put("packs/public", write([problem for problem, _ in pairs]))
    secret = objects.put("packs/hidden", write([hidden for _, hidden in pairs]))
    config = RunConfig(run="r-1", base=base, pack=public, pack_hidden=secret)
    objects.put("runs/r-1/config.json", msgspec.json.encode(config))
    key = attempt.trajectory.key = AttemptKey(attempt="a-1", epoch=0, group="g-1", problem="add-1")
    ref = objects.put("runs/r-1/attempts/a-1/0/trajectory-1.safetensors.zst", pack_trajectory(attempt.trajectory))
    shown = cli(tmp_path, "show", "r-1/a-1").stdout
    for line in (
        '● edit(line=2, old="-", new="+")',
        "+    return a + b",
        "versions  7–7",
        "no grader has left a verdict",
    ):
        assert line in shown
    verdict = Verdict(solved=True, passed=2, total=2)
    findings = {"untested_submit": Finding(1.0, ["it submitted \x1b[2J untested"])}
    objects.put(verdict_key("r-1", key, ref), msgspec.json.encode(Graded(verdict=verdict, findings=findings)))
    score(tmp_path / "state" / "ledger.db", reward=0.9, terms={"solved": 1.0, "length": -0.1})
    graded = cli(tmp_path, "show", "r-1/a-1").stdout
    for line in (
        "solved: 2 of 2 tests",
        "untested_submit  it submitted ⟨ESC⟩[2J",
        "reward  0.9  = solved +1, length -0.1",
    ):
        assert line in graded
    for name in ("r-1/a-2", "r-1/"):
        refused = cli(tmp_path, "show", name)
        assert refused.exit_code == 2
        assert "allowed: r-1/a-1 (`etude ledger show r-1`)" in refused.stderr
    missing = cli(tmp_path, "show", "r-1/a-2")
    assert (missing.exit_code, "no trajectory of attempt 'a-2'" in missing.stderr) == (2, True)


# Refusals


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{problems}#add-3", "--scripted", "{script}"], "found no problem 'add-3' among 2; near: {problems}#add-2"),
        (
            ["{folder}/none.jsonl", "--scripted", "{script}"],
            "not there; allowed: FILE.jsonl, FILE.jsonl#ID or PACKDIR#ID",
        ),
        (["{problems}"], "found neither --policy nor --scripted"),
        (["{problems}", "--policy", "{folder}"], "found no config.json there"),
        (["{problems}", "--policy", "x", "--scripted", "{script}"], "give one of them"),
    ],
)
def test_a_wrong_command_is_refused_with_the_way_out(
    tmp_path: Path, problems: Path, words: list[str], said: str
) -> None:
    names = {"problems": str(problems), "folder": str(tmp_path), "script": str(script(tmp_path, REPLIES))}
    result = cli(tmp_path, "run", *(word.format(**names) for word in words))
    assert result.exit_code == 2
    assert said.format(**names) in result.stderr


def test_a_policy_that_does_not_answer_is_no_wrong_command(tmp_path: Path, problems: Path) -> None:
    result = cli(tmp_path, "run", problems, "--policy", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "Cannot connect to host 127.0.0.1:9" in result.stderr


def test_a_machine_without_sandboxes_is_no_wrong_command(tmp_path: Path, problems: Path) -> None:
    bubblewrap.program.cache_clear()  # another test may have found it
    result = cli(
        tmp_path, "run", problems, "--scripted", script(tmp_path, REPLIES), sandbox="bubblewrap", PATH=str(tmp_path)
    )
    assert result.exit_code == 1
    assert "bwrap is not on the PATH" in result.stderr


def test_an_unknown_attempt_names_those_that_are_near(tmp_path: Path) -> None:
    result = cli(tmp_path, "show", "h-1")
    assert result.exit_code == 2
    assert "no attempt is kept there; `etude rollout run` makes one" in result.stderr


@pytest.mark.slow
def test_a_checkpoint_is_served_by_an_engine_of_its_own(tmp_path: Path, problems: Path) -> None:
    record, attempt = made(tmp_path, cli(tmp_path, "run", problems, "--policy", BASE, "--seed", 3, "--json"))
    assert (record["trainable"], record["format"]) == (True, "compact-1")
    (segment, *_) = attempt.trajectory.segments
    assert (segment.logprobs[segment.loss_mask] < 0).any()
