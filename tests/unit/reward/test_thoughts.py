"""The quick scan for comments finds what Python's tokenizer finds, in code and in what is none."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.reward.terms.thoughts_in_comments import _scanned, _tokenized, comments

PIECES = (
    "# wait", "#", "'", '"', "'''", '"""', "\\", "\n", "\n    ", "\n  ", "\n\t", "\n        ", "(", ")", "[", "]", "{", "}", "x",
    " ", "''",
    "rb'a#'", "f'{x}'", "'a\\'#'", "\\\n", "if x:", "\r\n", "\f", "\\'", "'#'", '"#"', "é", "\0", "1", "0x", "\ufeff",
)  # fmt: skip
text = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)


@settings(max_examples=300)
@given(text, st.integers(0, 12))
@example("x = '''\n# no\n'''  # wait\n", 3)
@example("if x:\n    y\n  z  # wait\n# wait\n", 9)
@example("(\n# wait\n", 9)
@example("'' ''' # '''# wait", 1)
def test_comments_up_to_a_line_are_those_of_the_tokenizer(text: str, last: int) -> None:
    wanted = [found for found in _tokenized(text) if found[0] <= last]
    assert [found for found in comments(text, last) if found[0] <= last] == wanted


def test_real_code_is_scanned_and_not_tokenized() -> None:
    paths = sorted(Path(json.__file__).parent.parent.glob("[a-c]*.py"))[:15]
    scanned = [
        (_scanned(source, 10**6), _tokenized(source)) for source in map(Path.read_text, paths) if "\f" not in source
    ]
    assert len(scanned) > 5
    assert all(quick == slow for quick, slow in scanned)
