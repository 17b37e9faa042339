"""Problems: schema v1 (JSONL), values, packs. `docs/problems.md` documents the format for people who bring their own."""

from shared.problems.schema import (
    Case,
    FunctionHidden,
    FunctionProblem,
    Hidden,
    Limits,
    Problem,
    ProblemError,
    parse_line,
)

__all__ = ["Case", "FunctionHidden", "FunctionProblem", "Hidden", "Limits", "Problem", "ProblemError", "parse_line"]
