from hypothesis import given
from hypothesis import strategies as st

from shared.environments.repository.cutting import cut, joined


def test_a_long_output_keeps_both_ends_and_says_how_many_lines_are_left_out() -> None:
    text = "\n".join(f"line {number}" for number in range(10_000))
    parts = cut(text, 200)
    assert parts is not None
    shown = joined(text, parts, "/tmp/output-1.txt")
    kept = [line for line in shown.split("\n") if line.startswith("line")]
    assert f"[{10_000 - len(kept)} lines left out; all of it: /tmp/output-1.txt]" in shown
    assert shown.startswith("line 0\nline 1\n")
    assert shown.endswith("\nline 9999")


@given(st.text(st.sampled_from("ab\n"), max_size=400), st.integers(10, 100))
def test_both_parts_are_the_text_s_ends_and_never_overlap(text: str, most: int) -> None:
    parts = cut(text, most)
    if parts is None:
        assert len(text) <= most
        return
    head, end = parts
    assert text.startswith(head)
    assert text.endswith(end)
    assert len(head) + len(end) <= most
