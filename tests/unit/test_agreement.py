"""How ranks learn of each other's outcome: one process passes through, and what several say becomes one error.

Other ranks are played by the answers of `gather_json`; runs of real ranks are in tests/dist.
"""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_ptq.distributed import agreement
from hf_ptq.distributed.agreement import (
    broadcast,
    first_decides,
    gather_json,
    least,
    most,
    reduce_over_ranks,
    same_everywhere,
    together,
)
from hf_ptq.distributed.launch import Launch
from hf_ptq.distributed.process_group import DistributedState
from hf_ptq.errors import HfPtqError, Problem, RunError, UserError

CPU = torch.device("cpu")
ALONE = DistributedState(0, 1, CPU)
DISK = Problem("the disk is full", "free room")


def fail_with(error: BaseException) -> Any:
    raise error


# ---- one process


def test_one_process_passes_through() -> None:
    """No process group is there, and none is asked for."""
    assert not dist.is_initialized()
    value, tensor = object(), torch.tensor([float("nan"), 2.0])
    assert together(ALONE, "load", lambda: value) is value
    assert first_decides(ALONE, "resolve", lambda: value) is value
    assert gather_json(ALONE, value) == [value]
    assert broadcast(ALONE, tensor) is tensor
    assert (least(ALONE, 7), most(ALONE, 7)) == (7, 7)
    for reduction in ("max", "sum"):
        reduce_over_ranks(ALONE, tensor, reduction)
    assert tensor.isnan().tolist() == [True, False]
    same_everywhere(ALONE, "compare", {"the commit": "a"})


@pytest.mark.parametrize("error", [UserError(DISK), RunError(DISK), ZeroDivisionError("in the deep")])
@pytest.mark.parametrize("enter", [together, first_decides])
def test_an_error_of_one_process_is_its_own_with_the_step(enter: Any, error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        enter(ALONE, "load the model", lambda: fail_with(error))
    assert caught.value is error
    assert error.__notes__[-1] == "in step: load the model"
    assert getattr(error, "is_agreed", False) is False


# ---- several ranks


def state_of(rank: int, world: int) -> DistributedState:
    watch: Any = SimpleNamespace(step="start", waiting=contextlib.nullcontext)
    return DistributedState(rank, world, CPU, Launch(rank, world, rank, world), watch)


def outcome(rank: int, *problems: Problem, user: bool = False) -> dict[str, Any]:
    return {"rank": f"rank {rank}", "user": user, "problems": [[p.what, p.cure] for p in problems]}


@pytest.fixture
def others_say(monkeypatch: pytest.MonkeyPatch):
    """Puts answers into the place of the other ranks'; returns what this rank tells them."""
    told: list[Any] = []

    def put(state: DistributedState, others: dict[int, Any]) -> list[Any]:
        def gather(_: DistributedState, own: Any) -> list[Any]:
            told.append(own)
            return [own if rank == state.rank else others.get(rank) for rank in range(state.world_size)]

        monkeypatch.setattr(agreement, "gather_json", gather)
        return told

    return put


def test_all_well(others_say) -> None:
    state = state_of(1, 3)
    told = others_say(state, {})
    assert together(state, "load", lambda: 5) == 5
    assert told == [None]
    assert state.watch.step == "load"  # type: ignore[union-attr]


@pytest.mark.parametrize("is_user", [True, False])
def test_what_this_rank_tells(others_say, is_user: bool) -> None:
    state = state_of(1, 2)
    told = others_say(state, {})
    error = (UserError if is_user else RunError)(DISK, "no place")
    with pytest.raises(UserError if is_user else RunError) as caught:
        together(state, "load", lambda: fail_with(error))
    problems = [["the disk is full", "free room"], ["no place", ""]]
    assert told == [{"rank": state.launch.name, "user": is_user, "problems": problems}]
    assert caught.value.is_agreed
    assert caught.value.__cause__ is error
    where = f"{state.launch.name}, step 'load': "
    assert [(p.what, p.cure) for p in caught.value.problems] == [
        (f"{where}the disk is full", "free room"),
        (f"{where}no place", ""),
    ]


def test_a_bug_is_told_with_its_place(others_say) -> None:
    state = state_of(0, 2)
    told = others_say(state, {})
    with pytest.raises(RunError) as caught:
        together(state, "load", lambda: fail_with(ZeroDivisionError("in the deep")))
    ((what, cure),) = told[0]["problems"]
    assert what.startswith("ZeroDivisionError: in the deep\nTraceback")
    assert "in fail_with" in what
    assert (cure, told[0]["user"]) == ("", False)
    assert str(caught.value).startswith(f"{state.launch.name}, step 'load': ZeroDivisionError: in the deep")


def test_another_ranks_error_is_raised_here(others_say) -> None:
    """Also where the work of this rank went well."""
    state = state_of(0, 2)
    others_say(state, {1: outcome(1, DISK)})
    with pytest.raises(RunError) as caught:
        together(state, "load", lambda: 5)
    assert [str(p) for p in caught.value.problems] == ["rank 1, step 'load': the disk is full\n    -> free room"]
    assert caught.value.__cause__ is None


def test_an_agreed_error_is_not_agreed_upon_again(others_say) -> None:
    """All ranks have it already; a second agreement would tell it with all their names."""
    state = state_of(1, 2)
    told = others_say(state, {})
    error = UserError(DISK)
    error.is_agreed = True
    with pytest.raises(UserError) as caught:
        together(state, "outer", lambda: fail_with(error))
    assert caught.value is error
    assert told == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_end_that_is_no_error_is_not_agreed_upon(others_say, kind: type[BaseException]) -> None:
    """The process group's own block tells the others of it."""
    told = others_say(state_of(1, 2), {})
    with pytest.raises(kind):
        together(state_of(1, 2), "load", lambda: fail_with(kind()))
    assert told == []


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_decides(others_say, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Rank 0 works, and all get what it found as JSON gives it back; the others do not work."""
    state, worked = state_of(rank, 2), []
    others_say(state, {})
    sent = []
    monkeypatch.setattr(agreement, "_broadcast_text", lambda _, text: (sent.append(text), '{"files": ["a", "b"]}')[1])
    found = first_decides(state, "resolve", lambda: (worked.append(1), {"files": ("a", "b")})[1])
    assert found == {"files": ["a", "b"]}
    assert worked == [1] * (rank == 0)
    assert sent == ['{"files": ["a", "b"]}' if rank == 0 else "null"]


def test_what_the_first_refuses_is_said_without_its_name(others_say) -> None:
    state = state_of(1, 2)
    others_say(state, {0: outcome(0, DISK, user=True)})
    with pytest.raises(UserError, match=r"^the disk is full") as caught:
        first_decides(state, "resolve", lambda: pytest.fail("rank 1 does not work"))
    assert caught.value.is_agreed


# ---- the wording


def said(outcomes: list[dict | None], for_all: bool = False) -> tuple[type[HfPtqError], list[tuple[str, str]]]:
    error = agreement._agreed_error("load", outcomes, for_all)
    assert error.is_agreed
    return type(error), [(problem.what, problem.cure) for problem in error.problems]


TIME = Problem("no time", "wait")


@pytest.mark.parametrize("user", [True, False])
@pytest.mark.parametrize("for_all", [True, False])
def test_what_all_ranks_say_is_said_once_without_names(user: bool, for_all: bool) -> None:
    outcomes: list[dict | None] = [outcome(rank, DISK, TIME, user=user) for rank in range(3)]
    kind = UserError if user else RunError
    assert said(outcomes, for_all) == (kind, [("the disk is full", "free room"), ("no time", "wait")])


def test_what_some_ranks_say_is_said_with_their_names() -> None:
    one = said([None, outcome(1, DISK, user=True), None])
    assert one == (UserError, [("rank 1, step 'load': the disk is full", "free room")])
    two = said([outcome(0, DISK), None, outcome(2, DISK)])
    assert two == (RunError, [("rank 0, rank 2, step 'load': the disk is full", "free room")])
    many = said([outcome(rank, DISK) for rank in range(9)] + [None])
    assert many == (RunError, [("rank 0, rank 1, rank 2 and 6 more, step 'load': the disk is full", "free room")])


def test_each_problem_has_its_own_ranks() -> None:
    """The same text with another cure is another problem."""
    other = Problem("the disk is full", "take another path")
    kind, problems = said([outcome(0, DISK, TIME), outcome(1, TIME), outcome(2, TIME, other)])
    assert kind is RunError
    assert problems == [
        ("rank 0, step 'load': the disk is full", "free room"),
        ("no time", "wait"),
        ("rank 2, step 'load': the disk is full", "take another path"),
    ]


def test_one_rank_that_says_a_thing_twice_is_one_rank() -> None:
    assert said([outcome(0, DISK, DISK), None])[1] == [("rank 0, step 'load': the disk is full", "free room")]


def test_work_for_all_is_said_without_a_name_where_the_user_was_wrong() -> None:
    assert said([outcome(0, DISK, user=True), None], for_all=True) == (UserError, [("the disk is full", "free room")])
    named = "rank 0, step 'load': the disk is full"
    assert said([outcome(0, DISK), None], for_all=True) == (RunError, [(named, "free room")])


def test_a_wrong_request_and_a_failure_are_a_failed_run() -> None:
    for for_all in (True, False):
        kind, problems = said([outcome(0, DISK, user=True), outcome(1, TIME)], for_all)
        assert kind is RunError
        assert problems == [
            ("rank 0, step 'load': the disk is full", "free room"),
            ("rank 1, step 'load': no time", "wait"),
        ]


# ---- numbers


@pytest.mark.parametrize(
    ("reduction", "op", "before"),
    [
        ("max", dist.ReduceOp.MAX, [float("inf"), 1.0, float("inf")]),
        ("sum", dist.ReduceOp.SUM, [None, 1.0, float("inf")]),
    ],
)
def test_a_nan_is_infinity_in_a_maximum(monkeypatch: pytest.MonkeyPatch, reduction: str, op: Any, before: list) -> None:
    """Backends take the other rank's number for the larger one; the largest finite number is none of theirs."""
    calls = []
    monkeypatch.setattr(dist, "all_reduce", lambda flat, op: calls.append((flat, op, flat.tolist())))
    flat = torch.tensor([float("nan"), 1.0, float("inf")])
    reduce_over_ranks(state_of(0, 2), flat, reduction)
    ((given, asked, values),) = calls
    assert given is flat, "in place"
    assert asked == op
    assert [None if math.isnan(value) else value for value in values] == before


@pytest.mark.parametrize(("pick", "own", "largest", "expected"), [(most, 3, 9, 9), (least, 3, -2, 2)])
def test_one_number_of_all(monkeypatch: pytest.MonkeyPatch, pick: Any, own: int, largest: int, expected: int) -> None:
    """The least is the negated largest of the negated numbers."""
    sent = []

    def all_reduce(value: torch.Tensor, op: Any) -> None:
        sent.append((value.item(), op))
        value.fill_(largest)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    assert pick(state_of(0, 2), own) == expected
    assert sent == [(own if pick is most else -own, dist.ReduceOp.MAX)]


def test_what_differs_is_named_with_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [{"the commit": "a", "the option seed": "1"}, {"the commit": "b", "the option seed": "1"}]
    told += [{"the commit": "a", "the option seed": "1"}, {"the commit": "a"}]
    answers = iter([told])
    monkeypatch.setattr(agreement, "gather_json", lambda state, own: next(answers, [own] * 4))
    with pytest.raises(UserError) as caught:
        same_everywhere(state_of(0, 4), "compare", told[0])
    assert [(p.what, p.cure) for p in caught.value.problems] == [
        ('the ranks do not agree on the commit: "a" on rank 0, 2, 3; "b" on rank 1', "start them all alike"),
        ('the ranks do not agree on the option seed: "1" on rank 0, 1, 2; null on rank 3', "start them all alike"),
    ]
    assert caught.value.is_agreed
    answers = iter([[told[0]] * 4])
    same_everywhere(state_of(0, 4), "compare", told[0])
