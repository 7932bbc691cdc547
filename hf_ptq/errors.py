"""Errors that are part of the interface.

`UserError`: the request was wrong (exit code 2). It carries *all* problems found in one step, each with its
cure, and is raised before anything expensive. `RunError`: the request was right and the run failed (exit code 1).
Anything else that leaves the program is a bug of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """What is wrong (naming the option, file, tensor or module), and what cures it.

    Options are written as the command has them, `--overwrite`; the library rewords them (wording.py).
    """

    what: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.what}\n    -> {self.cure}" if self.cure else self.what


class HfPtqError(Exception):
    """An error with a message for the user; `exit_code` is the process's.

    `is_agreed`: every rank of the run has this error, so one of them tells it (distributed/agreement.py).
    """

    exit_code = 1
    is_agreed = False

    def __init__(self, *problems: Problem | str) -> None:
        self.problems = tuple(Problem(p) if isinstance(p, str) else p for p in problems)
        super().__init__("\n".join(str(p) for p in self.problems))

    def reword(self, say: Callable[[str], str]) -> None:
        """Put every problem and every cure into other words; the error stays this one."""
        self.problems = tuple(Problem(say(problem.what), say(problem.cure)) for problem in self.problems)
        self.args = ("\n".join(str(problem) for problem in self.problems),)


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


def as_text(error: HfPtqError) -> str:
    """One block for the screen: every problem with its cure."""
    reason = "this request cannot be carried out" if isinstance(error, UserError) else "the run failed"
    if len(error.problems) == 1:
        return f"hf-ptq: {reason}: {error.problems[0]}"
    items = (f"{i}. {problem}".replace("\n", "\n  ") for i, problem in enumerate(error.problems, 1))
    return "\n  ".join((f"hf-ptq: {reason}, for {len(error.problems)} reasons:", *items))
