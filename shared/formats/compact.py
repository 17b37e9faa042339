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
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from shared.formats import Action, Observation, Tool
from shared.formats.card import BadCard, context_of
from shared.formats.edits import indentation
from shared.problems import Problem, values

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


class FormatError(ValueError):
    """A problem that this format cannot write; the text says what is allowed."""


class _Broken(Exception):
    """A call that cannot be read."""


class Compact:
    """Implements shared.formats.Format. The first len(SPECIAL) ids of the vocabulary are SPECIAL, in this order."""

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
        """The format of a checkpoint directory, by its etude.json."""
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
        """Text to ids, never a special one."""
        return list(self._encode(text))

    def _encode_uncached(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def line_token(self, line: int) -> int:
        """The token that names a zero-based line."""
        return self._lines[line]

    def code(self, text: str) -> list[int]:
        """<task> and the numbered lines of a file. Raises FormatError beyond MAX_LINES lines."""
        lines = _lines(text)
        if len(lines) > MAX_LINES:
            raise FormatError(f"a file of {len(lines)} lines; {NAME} writes at most {MAX_LINES}")
        ids = [self.task]
        for number, line in enumerate(lines):
            indent = indentation(line)
            steps = min(len(indent) // INDENT, MAX_INDENT) if indent.isascii() and "\t" not in indent else 0
            ids.append(self._lines[number])
            if steps:
                ids.append(self._indents[steps - 1])
            ids += self._encode(line[steps * INDENT :])
        return ids

    def prompt(self, problem: Problem, files: dict[str, str], summary: tuple[int, ...] = ()) -> list[int]:
        """What the broken code returned is shown only while the files are the problem's own. Raises FormatError."""
        ids = self._prompt(problem, files, summary)
        if len(ids) >= self.context:
            raise FormatError(f"problem {problem.id}: a prompt of {len(ids)} tokens; the context holds {self.context}")
        return ids

    def _prompt(self, problem: Problem, files: dict[str, str], summary: tuple[int, ...] = ()) -> list[int]:
        """However long it gets."""
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

    def objection(self, problem: Problem) -> str:
        """More visible cases than MAX_CASES are none: the agent's tests run them all, the prompt shows the first."""
        if len(problem.files) != 1:
            names = ", ".join(sorted(problem.files))
            return f"field 'files': found {len(problem.files)} files ({names:.80}); allowed: exactly one"
        ((path, text),) = problem.files.items()
        if (lines := len(_lines(text))) > MAX_LINES:
            return f"field 'files[{path}]': found {lines} lines; allowed: at most {MAX_LINES}"
        most = self.context - MIN_ROOM
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

    def fits(self, problem: Problem, room: int) -> bool:
        """Whether the problem can be written, with `room` tokens of the context left for the attempt."""
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
        """The shortest edit, in whole tokens, that turns the text of a line (without indentation) from `before` into
        `after`; None where there is none (equal texts)."""
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

    # Reading

    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def text(self, tokens: list[int]) -> str:
        return self.decode(tokens)

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
        """<Lk> OLD <got> NEW, read. Raises _Broken."""
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
        """The first `limit` tokens. Of a long text no more is read than they can hold: a solution may return megabytes."""
        most = (limit + 1) * self._longest
        ids = self._encode(text) if len(text) <= most else self._encode_uncached(text[:most])
        return list(ids) if len(ids) <= limit else [*ids[:limit], self.cut]


def _lines(text: str) -> list[str]:
    """Of a file, as they are numbered."""
    return text.rstrip("\n").split("\n")


def _shown(value: str) -> str:
    """A tagged value as Python would print it; anything else (an exception's name) as it is."""
    try:
        return values.show(value)
    except ValueError:
        return value


def _arguments(args: str) -> str:
    """The arguments as they would stand in a call."""
    return values.show(args)[1:-1]
