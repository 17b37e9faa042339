"""Repository problems have the levels repository, language and size; other problems have none."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest

from shared.contracts.run import Ref
from shared.contracts.trajectory import Change
from shared.environments.agent import AgentHidden, AgentProblem
from shared.environments.repository.levels import LANGUAGES
from shared.environments.repository.problem import RepositoryHidden, RepositoryProblem
from shared.problems import FunctionHidden, FunctionProblem

TREE = Ref(key="trees/t", size=1, checksum="0" * 32)


def of(
    origin: str = "", cell: str = "", solution: dict[str, Change] | None = None, runner: Any = "pytest"
) -> list[str]:
    problem = RepositoryProblem(id="p", tree=TREE, origin=origin, cell=cell)
    return problem.levels(RepositoryHidden(id="p", fail_to_pass=["t"], runner=runner, solution=solution or {}))


def test_a_function_problem_has_no_levels_so_its_category_stays_as_it_is() -> None:
    problem = FunctionProblem(id="p", files={"f.py": ""}, entry="f", visible=[], origin="toolz:toolz.itertoolz:take")
    assert problem.levels(FunctionHidden(id="p", cases=[], solution={"f.py": "x = 1\n"})) == []


def test_every_runner_of_tests_has_its_language() -> None:
    runners = get_args(get_type_hints(RepositoryHidden)["runner"])
    assert LANGUAGES.keys() == set(runners)
    assert [of(runner=runner) for runner in runners] == [[f"language-{LANGUAGES[runner]}"] for runner in runners]


@pytest.mark.parametrize(
    ("origin", "cell", "tags"),
    [
        ("psf/requests@0123abc", "psf/requests", []),  # the cell says it already
        ("psf/requests@0123abc", "sessions", ["repository-psf:requests"]),
        ("https://github.com/psf/requests.git", "sessions", ["repository-psf:requests"]),
        ("https://github.com/psf/requests", "psf/requests", []),
        ("requests", "sessions", []),  # a name alone is no repository
        ("toolz==1.0:toolz/itertoolz.py:take", "toolz", []),
        ("toolz:toolz/itertoolz.py:take", "toolz", []),
        ("harbor:task", "task", []),
        ("", "", []),
    ],
)
def test_the_repository_is_a_tag_where_the_cell_is_another(origin: str, cell: str, tags: list[str]) -> None:
    assert of(origin, cell) == [*tags, "language-python"]


@pytest.mark.parametrize(("lines", "tag"), [(1, "size-01"), (2, "size-02"), (255, "size-08"), (256, "size-09")])
def test_the_size_is_the_power_of_two_above_the_lines_that_the_solution_leaves(lines: int, tag: str) -> None:
    some, rest = lines // 2, lines - lines // 2
    solution = {"a.py": Change(text="x\n" * some), "b.py": Change(text="x\n" * rest), "gone.py": Change()}
    assert of(solution=solution) == ["language-python", tag]


def test_without_a_text_that_the_solution_leaves_there_is_no_size() -> None:
    assert of(solution={"gone.py": Change(), "picture.png": Change(data=b"\x89")}) == ["language-python"]


def test_a_repository_in_which_an_agent_of_others_works_has_the_same_levels() -> None:
    problem = AgentProblem(id="p", tree=TREE, agent="run", origin="a/b@1")
    assert problem.levels(AgentHidden(id="p", fail_to_pass=["t"])) == ["repository-a:b", "language-python"]


def test_no_level_splits_into_more_tags_or_is_longer_than_a_tag_may_be() -> None:
    (repository, _) = of("a/" * 100 + "b@1", "x")
    assert "/" not in repository
    assert len(repository) <= 100
