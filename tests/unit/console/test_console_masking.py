"""A secret that an agent met is on no page: not in the conversation, not in a difference, not token by token."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.console import changes, transcript
from services.console.site import templates
from shared.contracts.trajectory import Segment

SECRET = "AKIA" + "QRSTUVWXYZ234567"


class Letters:
    """A chat format whose tokens are pieces of a text, as far as `transcript` asks for it."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def text(self, ids: list[int]) -> str:
        return "".join(self.pieces[i] for i in ids)


def test_no_template_prints_one():
    page = templates().from_string("<p>{{ text }}</p>").render(text=f"key = {SECRET!r}")
    assert SECRET not in page
    assert "⟨AWS key⟩" in page


@given(st.lists(st.integers(1, 7), min_size=1, max_size=30), st.integers(0, 40), st.integers(1, 40))
def test_token_by_token_it_is_masked_however_it_is_cut_and_wherever_a_page_begins(cuts, first, count):
    text, pieces = f"key = {SECRET} # ok", []
    for n in cuts:
        pieces, text = [*pieces, text[:n]], text[n:]
    pieces.append(text)
    T = len(pieces)
    segment = Segment(
        tokens=np.arange(T, dtype=np.int32),
        loss_mask=np.ones(T, bool),
        logprobs=np.zeros(T, np.float32),
        versions=np.zeros(T, np.int32),
        oldest_kv_version=0,
        spans=[],
    )
    shown = transcript.tokens(segment, Letters(pieces), first, count)
    for token in shown:
        piece = pieces[token.index]
        inside = bool(set(piece) & set(SECRET))  # nothing else in the text has capitals or digits
        assert (token.text, token.id) == ((transcript.MASK, -1) if inside else (piece, token.index))


def test_a_difference_shows_none_even_where_it_stretches_over_lines():
    key = "-----BEGIN " + "PRIVATE KEY-----\nMIIEabc\nxyz\n-----END " + "PRIVATE KEY-----"
    lines = changes.compared("x = 1\n", f"x = '''{key}'''\n")
    assert lines[-1] == ("add", "+x = '''⟨private key⟩'''")
