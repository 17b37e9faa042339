"""Guessed inputs follow from the source and the seed, and hints are taken."""

from __future__ import annotations

import random

import pytest

from services.curator.fuzz import choose, shown
from services.curator.hints import guess
from services.curator.inputs import Pool, from_annotation, generate, infer
from shared.problems.schema import Case
from shared.problems.values import encode


@pytest.mark.parametrize(
    ("annotation", "specs"),
    [
        ("int", ["int"]),
        ("str | None", ["str", "none"]),
        ("Optional[float]", ["float", "none"]),
        ("list[tuple[int, str]]", [("list", ("tuple", "int", "str"))]),
        ("typing.Mapping[str, list[int]]", [("dict", "str", ("list", "int"))]),
        ("Literal['a', 'b']", [("const", ("a", "b"))]),
        ("'Sequence[bytes]'", [("list", "bytes")]),
        ("tuple[int, ...]", [("tuple", "int", "int")]),
        ("torch.Tensor", []),
        ("not an annotation", []),
    ],
)
def test_annotations_say_what_is_wanted(annotation: str, specs: list[object]):
    assert from_annotation(annotation) == specs


@pytest.mark.parametrize(
    "value", [3, "a", 2.5, True, None, b"x", [1], ["a"], (1, "a"), {"a": 1}, {1}, [[1]], {"a": [1]}]
)
def test_values_of_an_inferred_spec_have_the_kind_of_the_example(value: object):
    rng = random.Random(0)
    made = generate(infer(value), rng, Pool("def f(x): pass"))
    assert type(made) is type(value)
    encode([made])


def test_the_same_seed_gives_the_same_inputs():
    source = "def f(text, n):\n    return text.split('::')[n % 3]"

    def drawn() -> list[str]:
        rng = random.Random("seed")
        own, pool = guess(source, ["text", "n"], {}, []), Pool(source)
        return [encode([generate(spec, rng, pool) for spec in own.draw(rng, 0.1)]) for _ in range(40)]

    assert drawn() == drawn()
    assert any("::" in text for text in drawn())


def test_what_works_is_drawn_more_often():
    own = guess("def f(x):\n    return x", ["x"], {}, [])
    for _ in range(20):
        own.learn(("bytes",), True)
        own.learn(("int",), False)
    rng = random.Random(0)
    drawn = [own.draw(rng, 0.0) for _ in range(50)]
    assert drawn.count(("bytes",)) > 40
    assert ("int",) not in drawn


def _cases(results: list[object]) -> list[Case]:
    return [Case(args=encode([index]), expected=encode(result)) for index, result in enumerate(results)]


@pytest.mark.parametrize(
    ("why", "results"),
    [
        ("too few", list("abcdefgh")),
        ("always the same", ["a"] * 20),
        ("the input again", list(range(20))),
        ("hardly ever false", [True] * 16 + [False] * 2),
        ("three results only", ["a", "b", "c"] * 6),
    ],
)
def test_behaviour_that_says_too_little_is_not_kept(why: str, results: list[object]):
    assert choose(_cases(results)) == []


def test_no_result_dominates_and_the_choice_does_not_depend_on_the_order():
    cases = _cases(["a"] * 30 + [str(index) for index in range(8)])
    chosen = choose(cases)
    assert 9 <= len(chosen) <= 18
    assert sum(case.expected == '"a"' for case in chosen) <= 5
    assert chosen == choose(cases[::-1])
    assert shown(chosen[0].args).isdigit()
