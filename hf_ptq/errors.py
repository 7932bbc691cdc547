"""Errors that are part of the interface.

`UserError`: the request was wrong (exit code 2). It carries *all* problems found in one step, each with its
cure, and is raised before anything expensive. `RunError`: the request was right and the run failed (exit code 1).
Anything else that leaves the program is a bug of ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """What is wrong (naming the option, file, tensor or module), and what cures it."""

    what: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.what}\n    -> {self.cure}" if self.cure else self.what


class HfPtqError(Exception):
    """An error with a message for the user; `exit_code` is the process's."""

    exit_code = 1

    def __init__(self, *problems: Problem | str) -> None:
        self.problems = tuple(Problem(p) if isinstance(p, str) else p for p in problems)
        super().__init__("\n".join(str(p) for p in self.problems))


class UserError(HfPtqError):
    """The request cannot be carried out as it stands."""

    exit_code = 2


class RunError(HfPtqError):
    """The run failed."""

    exit_code = 1


def refuse_if_any(problems: Iterable[Problem]) -> None:
    """Raise one `UserError` with every problem of a step; nothing if there is none."""
    found = tuple(problems)
    if found:
        raise UserError(*found)
