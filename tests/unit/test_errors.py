"""How problems look on the screen."""

from __future__ import annotations

import pytest

from hf_ptq.errors import HfPtqError, Problem, RunError, UserError, as_text, refuse_if_any


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (UserError(Problem("no place")), "hf-ptq: this request cannot be carried out: no place"),
        (UserError("no place"), "hf-ptq: this request cannot be carried out: no place"),
        (
            RunError(Problem("the disk is full", "free room")),
            "hf-ptq: the run failed: the disk is full\n    -> free room",
        ),
        (
            UserError(Problem("no place", "make some"), "no time", Problem("two\nlines", "one")),
            "hf-ptq: this request cannot be carried out, for 3 reasons:\n"
            "  1. no place\n      -> make some\n  2. no time\n  3. two\n  lines\n      -> one",
        ),
        (RunError("a", "b"), "hf-ptq: the run failed, for 2 reasons:\n  1. a\n  2. b"),
    ],
)
def test_all_problems_with_their_cures(error: HfPtqError, text: str) -> None:
    assert as_text(error) == text


def test_an_error_is_its_own_ranks_until_the_ranks_have_agreed() -> None:
    assert not UserError("x").is_agreed
    assert (UserError.exit_code, RunError.exit_code) == (2, 1)


def test_refusals_are_one_error() -> None:
    refuse_if_any(())
    with pytest.raises(UserError) as caught:
        refuse_if_any(Problem(what) for what in "ab")
    assert [problem.what for problem in caught.value.problems] == ["a", "b"]
    assert str(caught.value) == "a\nb"
