"""Names of Python tests, `path/of/test_file.py::Class::test_name[parameters]`, for pytest and for unittest."""

from __future__ import annotations

from shared.environments.repository.trees import wrong_path

# Names that decide what pytest or the interpreter does, in any folder.
INFRASTRUCTURE = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
    *("pyproject.toml", "sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc", "*.pyo", "*.egg-info", "*.dist-info"),
    *("*.egg-link", "*.egg", "__pycache__", "pyvenv.cfg", "python*._pth", "pybuilddir.txt"),
)


def wrong_name(name: str) -> str | None:
    path, mark, _ = name.partition("::")
    if not mark or not path.endswith(".py") or wrong_path(path):
        return "path/of/test_file.py::name, as pytest writes it"
    return None


def file_of(name: str) -> str:
    return name.partition("::")[0]


def function_of(name: str) -> list[str]:
    """Return the classes and the function of a test, without its parameters."""
    return name.partition("::")[2].partition("[")[0].split("::")
