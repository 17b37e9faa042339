"""unittest: test cases by the standard library alone, started by `inside/grader.py`. Names are those of pytest."""

from shared.environments.repository.graders.pytest_runner import PytestRunner

RUNNER = PytestRunner("unittest")
