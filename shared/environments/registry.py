"""From a problem's kind to its environment. Environments are loaded when a problem of their kind is first met.

Other packages add theirs by an entry point of the group `etude.environments`: its name is the kind, its object a class that
is called with the `Places` of the service.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared.environments import Environment, InfrastructureError, Places
from shared.plugins import Plugins, UnknownName, Unloadable
from shared.problems.schema import Problem
from shared.sandbox import CANARY


class UnknownKind(InfrastructureError, ValueError):
    """No environment here knows the kind; the text says which kinds are known."""


PLUGINS = Plugins(
    "etude.environments",
    {
        "agent": "shared.environments.agent:AgentEnvironment",
        "function": "shared.environments.function:FunctionEnvironment",
        "repository": "shared.environments.repository:RepositoryEnvironment",
        "steps": "shared.environments.steps:StepsEnvironment",
        "verifiers": "shared.environments.verifiers:VerifiersEnvironment",
    },
)


def kinds() -> list[str]:
    """Return the names of all kinds that can be loaded here, without loading any."""
    return PLUGINS.names()


def factory(kind: str) -> Callable[[Places], Environment[Any, Any]]:
    """Return what makes the environment of a kind, as its `problem` and `hidden` can be asked for. Raises UnknownKind."""
    try:
        made: Callable[[Places], Environment[Any, Any]] = PLUGINS.load(kind)
    except UnknownName:
        raise UnknownKind(
            f"field 'kind': found {kind!r:.80}; allowed: {', '.join(kinds())} (another one comes with a package that has an "
            f"entry point {kind!r:.80} in the group {PLUGINS.group!r})"
        ) from None
    except Unloadable as error:
        raise UnknownKind(f"field 'kind': the environment {error}") from error
    return made


class Environments:
    """The environments of one process, each made once, on first use."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self._made: dict[str, Environment[Any, Any]] = {}
        self._working: set[str] = set()

    async def ready(self, kind: str = "") -> None:
        """Return once a sandbox has worked here since the last failure: one of that kind, or one of functions where `kind` is
        empty. Raises SandboxUnavailable, UnknownKind."""
        if kind not in self._working:
            await self.check(kind)
            self._working.add(kind)

    async def check(self, kind: str = "") -> None:
        """Run a canary in a sandbox of the kind, or as a function where `kind` is empty. A service without sandboxes for
        functions runs none. Raises SandboxUnavailable, UnknownKind."""
        if kind:
            await self.named(kind).ready()
        elif self.places.functions is not None:
            await self.places.functions.run([CANARY])

    def failed(self, kind: str) -> None:
        """Take note that a sandbox of the kind failed: `ready` runs a canary again."""
        self._working -= {kind, ""}

    def of(self, problem: Problem) -> Environment[Any, Any]:
        """Return the environment of the problem's kind. Raises UnknownKind."""
        return self.named(problem.kind)

    def named(self, kind: str) -> Environment[Any, Any]:
        """Return the environment of a kind. Raises UnknownKind."""
        if kind not in self._made:
            self._made[kind] = self._new(kind)
        return self._made[kind]

    def _new(self, kind: str) -> Environment[Any, Any]:
        make = factory(kind)
        try:
            made = make(self.places)
        except Exception as error:  # such as a method that every environment needs and this one lacks
            raise UnknownKind(
                f"field 'kind': the environment {PLUGINS.place(kind)} cannot be made: {type(error).__name__}: {error}; allowed: a "
                "class that docs/environments.md describes"
            ) from error
        if (found := getattr(made, "kind", None)) != kind:
            raise UnknownKind(
                f"field 'kind': the environment {PLUGINS.place(kind)} says that its kind is {found!r:.80}; allowed: the name of "
                "its entry point"
            )
        return made
