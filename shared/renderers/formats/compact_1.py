"""The compact format of the small base policy: own special tokens over a byte-level BPE (`compact-1`).

    prompt       <task> <L1>def f(a): <L2><i1>return a…<tests><T1>args<t>expected<got>actual|<pass>…[<sum>summary]<end>
    edit         <edit> <L2> OLD <got> NEW <end>     first occurrence of OLD in the text of line 2
    undo         <undo>                              takes the last edit back
    test         <test>                              ends the generation; answered by an observation
    submit       <submit>                            ends the attempt
    observation  <obs> <pass> <end>   |   <obs> <T1>got <end>   |   <obs> <broken> <end>
    summary      asked for by <sum>; the model writes <L2> OLD <got> NEW <end> … <done>

Invariants: text never yields a special token (a file that holds `<test>` is spelled in bytes); `actions` never raises;
a generation ends after <test>, <submit> or <done>. Values are cut, marked by <cut>, so that a prompt stays bounded.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from shared.environments import Brief, Call, Result, ToolSpec
from shared.environments.function.actions import Action, Observation, Tool
from shared.environments.function.brief import Subject
from shared.environments.function.edits import indentation
from shared.problems import FunctionProblem, values
from shared.renderers import Exchange, Reading, Tail, TooLong
from shared.renderers.card import BadCard, context_of

NAME = "compact-1"
MAX_LINES, MAX_CASES, MAX_INDENT, INDENT = 48, 8, 8, 4
MAX_ARGS, MAX_EXPECTED, MAX_GOT = 64, 32, 16  # tokens of a shown value before <cut>
MIN_ROOM = 32  # tokens that a prompt leaves for the attempt: an edit of 20, <test>, its answer, <submit>, and some air
SMALLEST_CONTEXT = MIN_ROOM + 1  # with less no prompt at all would fit

CONTROL = (
    "<pad>", "<task>", "<tests>", "<t>", "<got>", "<edit>", "<undo>", "<test>", "<submit>", "<sum>", "<done>", "<obs>",
    "<pass>", "<broken>", "<cut>", "<end>", "<eos>",
)  # fmt: skip
SPECIAL = (
    *CONTROL,
    *(f"<i{i}>" for i in range(1, MAX_INDENT + 1)),
    *(f"<T{i}>" for i in range(1, MAX_CASES + 1)),
    *(f"<L{i}>" for i in range(1, MAX_LINES + 1)),
)
# Where a line begins for people.
_BREAK_BEFORE = re.compile(r"(?<!^)(?=<(?:L\d+|T\d+|tests|obs|edit|undo|test|submit|sum)>)")


class FormatError(ValueError):
    """A problem that this format cannot write; the text says what is allowed."""


class FormatTooLong(FormatError, TooLong):
    """A file or a prompt is longer than the format or the context takes. The agent's edits may have made it so."""


class _Broken(Exception):
    """A call that cannot be read."""


class Compact:
    """Implements shared.renderers.Renderer for problems of kind `function`. The first len(SPECIAL) ids of the vocabulary are
    SPECIAL, in this order."""

    name = NAME

    def __init__(self, tokenizer: Path, context: int = 512) -> None:
        if not tokenizer.is_file():
            raise FormatError(f"no tokenizer at {tokenizer}")
        try:
            self.tokenizer = Tokenizer.from_file(str(tokenizer))
        except Exception as error:  # the package raises nothing narrower
            raise FormatError(f"{tokenizer}: no tokenizer can be read from it ({error})") from None
        for i, token in enumerate(SPECIAL):
            if self.tokenizer.token_to_id(token) != i:
                found = self.tokenizer.token_to_id(token)
                raise FormatError(f"{tokenizer}: special token {token} has id {found}, expected {i}: not of {NAME}")
        self.tokenizer.encode_special_tokens = True  # special tokens within a text are text
        self.context = context
        self.vocab_size = self.tokenizer.get_vocab_size()
        ids = {token.strip("<>"): i for i, token in enumerate(SPECIAL)}
        self.pad, self.task, self.tests, self.t, self.got = (ids[k] for k in ("pad", "task", "tests", "t", "got"))
        self.edit, self.undo, self.test, self.submit = (ids[k] for k in ("edit", "undo", "test", "submit"))
        self.sum, self.done, self.obs, self.passed = (ids[k] for k in ("sum", "done", "obs", "pass"))
        self.broken, self.cut, self.end, self.eos = (ids[k] for k in ("broken", "cut", "end", "eos"))
        self._indents = [ids[f"i{i}"] for i in range(1, MAX_INDENT + 1)]
        self._cases = [ids[f"T{i}"] for i in range(1, MAX_CASES + 1)]
        self._lines = [ids[f"L{i}"] for i in range(1, MAX_LINES + 1)]
        self._line_of = {token: i for i, token in enumerate(self._lines)}
        self.stop_tokens = (self.test, self.submit, self.done)
        self._longest = max(map(len, self.tokenizer.get_vocab()))  # characters of a token
        self._encode = functools.lru_cache(maxsize=1 << 16)(self._encode_uncached)

    @classmethod
    def load(cls, checkpoint: Path) -> Compact:
        """Return the renderer of a checkpoint directory. Raises FormatError if its etude.json names another format."""
        path = checkpoint / "etude.json"
        if not path.is_file():
            raise FormatError(
                f"{checkpoint}: found no etude.json there; allowed: a checkpoint directory as `etude export` writes it"
            )
        card = json.loads(path.read_text())
        if card.get("format") != NAME:
            raise FormatError(f"{path}: format {card.get('format')!r}; this reader knows {NAME!r}")
        try:
            context = context_of(card, SMALLEST_CONTEXT)
        except BadCard as error:
            raise FormatError(f"{path}: {error}") from None
        if context is None:
            raise FormatError(f"{path} has no 'context'; allowed: a whole number from {SMALLEST_CONTEXT}")
        return cls(checkpoint / "tokenizer.json", context)

    # Writing

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, never a special token."""
        return list(self._encode(text))

    def _encode_uncached(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def line_token(self, line: int) -> int:
        """Return the token that names a zero-based line."""
        return self._lines[line]

    def code(self, text: str) -> list[int]:
        """Return <task> and the numbered lines of a file. Raises FormatError beyond MAX_LINES lines."""
        lines = _lines(text)
        if len(lines) > MAX_LINES:
            raise FormatTooLong(f"a file of {len(lines)} lines; {NAME} writes at most {MAX_LINES}")
        if length := self._too_long(lines):
            raise FormatTooLong(f"a file of {length:,} characters; the context holds {self.context} tokens")
        ids = [self.task]
        for number, line in enumerate(lines):
            indent = indentation(line)
            steps = min(len(indent) // INDENT, MAX_INDENT) if indent.isascii() and "\t" not in indent else 0
            ids.append(self._lines[number])
            if steps:
                ids.append(self._indents[steps - 1])
            ids += self._encode(line[steps * INDENT :])
        return ids

    def prompt(self, problem: FunctionProblem, files: dict[str, str], summary: tuple[int, ...] = ()) -> list[int]:
        """Return the ids of a prompt. It shows what the broken code returned only while the files are the problem's own. Raises
        FormatError."""
        ids = self._prompt(problem, files, summary)
        if len(ids) >= self.context:
            raise FormatTooLong(
                f"problem {problem.id}: a prompt of {len(ids)} tokens; the context holds {self.context}"
            )
        return ids

    def _too_long(self, lines: Sequence[str]) -> int | None:
        """Return the characters of lines that no context can hold, or None. Asked before they are encoded, which takes 200 bytes
        of memory for each character."""
        most = self.context * self._longest + len(lines) * MAX_INDENT * INDENT
        return length if (length := sum(map(len, lines))) > most else None

    def _prompt(self, problem: FunctionProblem, files: dict[str, str], summary: tuple[int, ...] = ()) -> list[int]:
        """Return the ids of a prompt, without checking that it fits the context. Raises FormatError."""
        if len(files) != 1:
            raise FormatError(f"problem {problem.id}: found {len(files)} files; {NAME} writes exactly one")
        (text,) = files.values()
        actual = problem.actual if files == problem.files else []
        ids = [*self.code(text), self.tests]
        for number, case in enumerate(problem.visible[:MAX_CASES]):
            ids.append(self._cases[number])
            ids += self._cut(_arguments(case.args), MAX_ARGS)
            ids.append(self.t)
            ids += self._cut(values.show(case.expected), MAX_EXPECTED)
            if number < len(actual):
                ids.append(self.got)
                same = values.equal(actual[number], case.expected)
                ids += [self.passed] if same else self._cut(_shown(actual[number]), MAX_GOT)
        if summary:
            ids += [self.sum, *summary]
        ids.append(self.end)
        return ids

    def opening(self, brief: Brief, summary: Sequence[int] = (), history: Sequence[Exchange] = ()) -> list[int]:
        """Return the prompt of the brief's problem. `history` is never needed: every answer can be appended. Raises FormatError."""
        subject = self._subject(brief)
        return self.prompt(subject.problem, subject.files, tuple(summary))

    def objection(self, brief: Brief) -> str | None:
        if not isinstance(brief.subject, Subject):
            return (
                f"format {NAME!r} writes problems of kind 'function' alone; allowed: a checkpoint with a chat format (etude "
                "import FOLDER --out DIR)"
            )
        return self.misfit(brief.subject.problem) or None

    def _subject(self, brief: Brief) -> Subject:
        if not isinstance(brief.subject, Subject):
            raise FormatError(str(self.objection(brief)))
        return brief.subject

    def misfit(self, problem: FunctionProblem) -> str:
        """Return why no attempt at the problem can be made: the field, what was found, what is allowed. Empty: it can. Never
        raises. More than MAX_CASES visible cases is no objection: the agent's tests run them all, the prompt shows the first."""
        if len(problem.files) != 1:
            names = ", ".join(sorted(problem.files))
            return f"field 'files': found {len(problem.files)} files ({names:.80}); allowed: exactly one"
        ((path, text),) = problem.files.items()
        lines = _lines(text)
        if len(lines) > MAX_LINES:
            return f"field 'files[{path}]': found {len(lines)} lines; allowed: at most {MAX_LINES}"
        most = self.context - MIN_ROOM
        if length := self._too_long(lines):
            return (
                f"field 'files[{path}]': found {length:,} characters; allowed: at most {most} tokens with the cases (a context "
                f"of {self.context}, less {MIN_ROOM} for the attempt)"
            )
        try:
            code, whole = len(self.code(text)), len(self._prompt(problem, problem.files))
        except ValueError as error:  # a pack of others may hold values that nobody has checked
            return f"field 'visible': {error}"
        if whole > most:
            return (
                f"fields 'files' and 'visible': found a prompt of {whole} tokens, {code} of them the code; allowed: at most "
                f"{most} (a context of {self.context}, less {MIN_ROOM} for the attempt)"
            )
        return ""

    def fits(self, problem: FunctionProblem, room: int) -> bool:
        """Return whether the problem can be written with `room` tokens of the context left for the attempt."""
        try:
            return len(self.prompt(problem, problem.files)) + room <= self.context
        except FormatError:
            return False

    def observation(self, observation: Observation) -> list[int]:
        if observation.error:
            return [self.obs, self.broken, self.end]
        if observation.failing is None:
            return [self.obs, self.passed, self.end]
        case = self._cases[observation.failing : observation.failing + 1]
        return [self.obs, *case, *self._cut(_shown(observation.got), MAX_GOT), self.end]

    def summary_request(self) -> list[int]:
        return [self.sum]

    def edit_call(self, line: int, before: str, after: str) -> list[int] | None:
        """Return the shortest edit, in whole tokens, that turns the text of a line (without indentation) from `before` into
        `after`; None if the texts are equal."""
        span = self.span(before, after)
        return None if span is None else [self.edit, self._lines[line], *span, self.end]

    def span(self, before: str, after: str) -> list[int] | None:
        """`OLD <got> NEW` of `edit_call`. OLD is made of whole tokens of the line, as the model sees it."""
        old, new = self._encode(before), self._encode(after)
        if old == new:
            return None
        shorter = min(len(old), len(new))
        head = next((i for i in range(shorter) if old[i] != new[i]), shorter)
        tail = next((i for i in range(shorter - head) if old[-1 - i] != new[-1 - i]), shorter - head)
        if head + tail == len(old) and old:  # a pure insertion needs a token to hold on to
            head, tail = (head, tail - 1) if tail else (head - 1, tail)
        while True:
            a, b = old[head : len(old) - tail], new[head : len(new) - tail]
            if before.replace(self.decode(a), self.decode(b), 1) == after if a else not before:
                return [*a, self.got, *b]
            if head == 0 and tail == 0:
                return None
            head, tail = (head - 1, tail) if head else (head, tail - 1)

    def answers(self, tail: Tail, results: Sequence[Result]) -> list[int]:
        """Return the answer to the last call that ran, or to the first broken one, which ends its turn."""
        ran = [result for result in results if result.ran]
        last = next((result for result in ran if not result.ok), ran[-1])
        return self.observation(last.detail if last.ok else Observation(Tool.edit, error="broken"))

    def asking(self, tail: Tail, results: Sequence[Result], text: str) -> list[int]:
        """Return the answers with the request for a summary. `text` is not written: the format has no other question."""
        return [*self.answers(tail, results), *self.summary_request()]

    # Reading

    def reading(self, completion: Sequence[int], context: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Reading:
        calls = (self._call(number, action) for number, action in enumerate(self.actions(list(completion))))
        return Reading(calls=tuple(calls))

    def _call(self, number: int, action: Action) -> Call:
        edit = action.tool is Tool.edit and not action.error
        arguments = {"line": action.line + 1, "old": action.old, "new": action.new} if edit else {}
        return Call(str(number), str(action.tool), arguments, action.start, action.end, action.error or None)

    def kept(self, completion: Sequence[int]) -> tuple[int, ...]:
        ends = len(completion) > 0 and completion[-1] in self.stop_tokens
        return tuple(completion[:-1] if ends else completion)

    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def text(self, ids: Sequence[int]) -> str:
        return self.decode(list(ids))

    def laid_out(self, ids: Sequence[int]) -> str:
        """Return the text with a line for each marker: the format itself has no line breaks."""
        return _BREAK_BEFORE.sub("\n", self.text(ids))

    def actions(self, completion: list[int]) -> list[Action]:
        if completion and completion[-1] == self.done:
            end = len(completion)
            return [Action(Tool.summary, 0, end, text=self.decode(completion[:-1]))]
        return list(self._actions(completion))

    def _actions(self, completion: list[int]) -> Iterator[Action]:
        simple = {self.undo: Tool.undo, self.test: Tool.test, self.submit: Tool.submit}
        at = 0
        while at < len(completion):
            token, start = completion[at], at
            if token in simple:
                at += 1
                yield Action(simple[token], start, at)
                if token in self.stop_tokens:
                    return
                continue
            if token != self.edit:
                yield Action(Tool.edit, start, len(completion), error="no call begins here")
                return
            try:
                end = completion.index(self.end, at)
            except ValueError:
                yield Action(Tool.edit, start, len(completion), error="the edit has no end")
                return
            at = end + 1
            try:
                line, old, new = self._edit(completion[start + 1 : end])
            except _Broken as broken:
                yield Action(Tool.edit, start, at, error=str(broken))
                return
            yield Action(Tool.edit, start, at, line=line, old=old, new=new)

    def _edit(self, body: list[int]) -> tuple[int, str, str]:
        """Read <Lk> OLD <got> NEW and return line, old and new text. Raises _Broken."""
        if not body or body[0] not in self._line_of:
            raise _Broken("the edit names no line")
        if body.count(self.got) != 1:
            raise _Broken("the edit has no single <got> between the old and the new text")
        at = body.index(self.got)
        old, new = body[1:at], body[at + 1 :]
        if any(token < len(SPECIAL) for token in (*old, *new)):
            raise _Broken("a special token within the text of an edit")
        texts = self.decode(old), self.decode(new)
        if "\ufffd" in texts[0] + texts[1]:
            raise _Broken("the text of the edit is no UTF-8")
        return self._line_of[body[0]], *texts

    def _cut(self, text: str, limit: int) -> list[int]:
        """Return the first `limit` tokens. Encode no more of a long text than they can hold: a solution may return megabytes."""
        most = (limit + 1) * self._longest
        ids = self._encode(text) if len(text) <= most else self._encode_uncached(text[:most])
        return list(ids) if len(ids) <= limit else [*ids[:limit], self.cut]


def _lines(text: str) -> list[str]:
    """Return the lines of a file as they are numbered."""
    return text.rstrip("\n").split("\n")


def _shown(value: str) -> str:
    """Return a tagged value as Python would print it; anything else (an exception's name) unchanged."""
    try:
        return values.show(value)
    except ValueError:
        return value


def _arguments(args: str) -> str:
    """Return the arguments as they would stand in a call."""
    return values.show(args)[1:-1]


def load(directory: Path) -> Compact:
    """Return the renderer of a checkpoint directory. Raises ValueError with the reason."""
    return Compact.load(directory)
