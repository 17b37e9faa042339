"""A lifted function stands alone: its file runs with nothing around it."""

from __future__ import annotations

import ast
import textwrap

import pytest

from services.curator.lift import Lifted, Refused, lift, plain
from services.curator.module import Module


def lifted(text: str, name: str = "f") -> Lifted:
    tree = ast.parse(textwrap.dedent(text))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    return lift(functions[0], Module.of(tree))


def call(own: Lifted, *args: object) -> object:
    scope: dict[str, object] = {}
    exec(own.source, scope)  # noqa: S102 the promise is that it runs
    return scope[own.entry](*args)  # type: ignore[operator]


def test_self_and_objects_become_their_fields():
    own = lifted(
        """
        class Box:
            def f(self, other: "Box") -> int:
                '''Area.'''
                return self._width * other.width - abs(self.border)
        """
    )
    assert own.params == ["width", "border", "other_width"]
    assert call(own, 3, 1, 5) == 14


def test_a_parameter_with_methods_of_values_stays_whole():
    own = lifted("def f(name, sep='.'):\n    return name.split(sep)[0].strip()")
    assert own.params == ["name", "sep"]
    assert own.required == 1
    assert call(own, "a.b") == "a"


def test_imports_constants_and_helpers_come_along():
    own = lifted(
        """
        import re
        from math import floor as down
        _DIGITS = re.compile('[0-9]+')
        LIMIT = 7
        def half(x):
            '''Half.'''
            return x / 2
        def f(text):
            return min(LIMIT, down(half(len(_DIGITS.findall(text)))))
        """
    )
    assert own.params == ["text"]
    assert call(own, "1 2 3 4 5") == 2


def test_a_free_value_becomes_a_parameter():
    own = lifted("def f(x):\n    return (x + offset) * 2 - 1")
    assert own.params == ["offset", "x"]
    assert call(own, 1, 2) == 5


def test_exceptions_of_the_module_become_value_error():
    own = lifted("def f(x):\n    if x < 0:\n        raise BadShapeError(x)\n    return x")
    with pytest.raises(ValueError):
        call(own, -1)


@pytest.mark.parametrize(
    "text",
    [
        "import os\ndef f(x):\n    return os.getcwd() + x",
        "from somewhere import g\ndef f(x):\n    return g(x)",
        "def f(x):\n    return open(x).read()",
        "def f(x):\n    global y\n    y = x\n    return y",
        "def f(x):\n    return x.__class__",
        "def f(g, x):\n    return g(x)",
        "def f():\n    return 1",
        "def f(x):\n    print(x)",
        "def f(x):\n    return unknown(x)",
        "class A:\n    def f(self, x):\n        return self.g(x)",
        "def f(x):\n    return 'ä' + x",
        "def f(x):\n    return x",
        "import random\ndef f(x):\n    return random.choice(x)",
    ],
)
def test_what_cannot_stand_alone_is_refused(text: str):
    with pytest.raises(Refused):
        lifted(text)


def test_hints_and_examples_are_kept():
    own = lifted(
        """
        def f(x: int, names: list[str]):
            '''
            >>> f(3, ['a'])
            'a'
            '''
            return names[x % len(names)]
        """
    )
    assert own.hints == {"x": "int", "names": "list[str]"}
    assert own.examples == [[3, ["a"]]]


def test_plain_leaves_the_original_untouched():
    tree = ast.parse("@d\ndef f(x: int = 1) -> int:\n    'Doc.'\n    y: int = x\n    z: int\n    return y")
    before = ast.dump(tree)
    assert ast.unparse(plain(tree.body[0])) == "def f(x=1):\n    y = x\n    return y"
    assert ast.dump(tree) == before
