import random
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from miniature import FUNCTIONS, outcome, own_functions

from services.trainer.base.corrupt import code_sample, denoising_sample, fits, rename, renamed, renaming
from services.trainer.base.samples import Weight
from shared.environments.function.edits import apply_edit
from shared.problems.values import decode, encode
from shared.renderers.formats.compact_1 import Compact


@cache
def sources() -> list[str]:
    """Some of the project's own functions; not read while tests are collected, which every worker does."""
    return [source for source in own_functions()[::11] if fits(source)]


def test_the_repairs_of_a_denoising_sample_give_the_original_back(compact: Compact) -> None:
    bugs = []
    for seed, source in enumerate(sources() * 3):
        sample = denoising_sample(source, compact, random.Random(seed))
        if sample is None:
            continue
        at = sample.ids.index(compact.end)
        broken, answer = sample.ids[:at], sample.ids[at + 1 : -1]
        files = {"m.py": _source(broken, compact)}
        actions = compact.actions(answer)
        for action in actions:
            files = apply_edit(files, action)
        assert files["m.py"] == source
        assert sample.ids[-1] == compact.eos
        assert all(w == Weight.action for w in sample.weights[at + 1 :])
        bugs.append(len(actions))
    assert set(bugs) == {1, 2, 3, 4, 5, 6}


def _source(ids: list[int], compact: Compact) -> str:
    """The file that `Compact.code` wrote."""
    lines: list[str] = []
    for token in ids[1:]:
        text = compact.text([token])
        if text.startswith("<L") and text.endswith(">"):
            lines.append("")
        elif text.startswith("<i") and text.endswith(">"):
            lines[-1] += "    " * int(text[2:-1])
        else:
            lines[-1] += text
    return "\n".join(lines)


def test_a_code_sample_is_the_function_as_it_is(compact: Compact) -> None:
    for source in sources():
        sample = code_sample(source, compact)
        assert sample is not None
        assert _source(sample.ids[:-1], compact) == source


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([item for f in FUNCTIONS.values() for item in f.items()]))
def test_renaming_changes_names_and_never_what_a_function_returns(rng: random.Random, item: tuple[str, list]) -> None:
    source, inputs = item
    other = renamed(source, rng)
    assert other != source
    for args in inputs:
        assert outcome(other, decode(encode(args))) == outcome(source, decode(encode(args)))


def test_names_that_others_rely_on_stay() -> None:
    source = (
        "import math\nLIMIT = 3\n\ndef helper(x, *, step=1):\n    return x + step\n\n"
        "def f(a):\n    global seen\n    seen = a\n    return helper(a, step=LIMIT) + math.floor(a)"
    )
    names = renaming(source, random.Random(1))
    assert set(names) == {"x", "a"}
    text = rename(source, names)
    assert "step=LIMIT" in text
    assert "global seen" in text
