"""Hostile text as people see it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.visible import visible


@given(st.text())
def test_visible_text_holds_nothing_that_steers_and_keeps_what_can_be_read(text):
    shown = visible(text)
    assert visible(shown) == shown
    assert all(c in "\n\t" or c.isprintable() or c.isspace() for c in shown)
    assert [c for c in text if c.isprintable()] == [c for c in shown if c in text and c.isprintable()] or "⟨" in shown


def test_escape_bidirectional_and_zero_width_characters_get_names():
    assert visible("a\x1b[31mb\u202ec\u200bd\x7f\r\n") == "a⟨ESC⟩[31mb⟨U+202E⟩c⟨U+200B⟩d⟨DEL⟩⟨CR⟩\n"
