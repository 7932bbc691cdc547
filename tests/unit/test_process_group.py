"""How an exception that ends a rank is told, and what ranks that have not met yet tell each other.

The store is one of this process; runs of real ranks are in tests/dist.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_ptq.distributed import process_group
from hf_ptq.distributed.launch import Launch
from hf_ptq.distributed.process_group import _account_of, _FailingTogether, exit_code, first_tells, tell_other_nodes
from hf_ptq.distributed.watch import CLEANED, FAILURE, TOLD, Watch
from hf_ptq.errors import Problem, RunError, UserError

DISK = Problem("the disk is full", "free room")
CLOSED = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically caused by a crash.")
LATE = RuntimeError("[buffer.cc:129] Timed out waiting 1800000ms for send operation to complete")


def watch_of(rank: int, world: int = 2, nodes: int = 1, store: dist.Store | None = None) -> Watch:
    local = world // nodes
    launch = Launch(rank, world, rank % local, local, rank // local, nodes)
    watch = Watch(store or dist.HashStore(), launch, 90.0)
    watch.step = "load"
    return watch


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


# ---- the words


@pytest.mark.parametrize(
    ("error", "cause", "first"),
    [
        (RunError(DISK), "the disk is full", ": the run failed: the disk is full\n    -> free room"),
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            "out of memory: CUDA out of memory",
            ": out of memory: CUDA out of memory\n    -> lower --batch_size or --calib_seq, or use more ranks",
        ),
        (KeyboardInterrupt(), "interrupted", ": interrupted"),
        (
            CLOSED,
            "the connection to another rank broke, as when its process is killed",
            ": the connection to another rank broke, as when its process is killed; last seen: rank 1 in step 'start' "
            "([pair.cc:553] Connection closed by peer [127.0.0.1]:1)",
        ),
        (
            LATE,
            "a collective was not answered within 1.5 minutes (--timeout_minutes)",
            ": a collective was not answered within 1.5 minutes (--timeout_minutes); last seen: rank 1 in step 'start' "
            "([buffer.cc:129] Timed out waiting 1800000ms for send operation to complete)",
        ),
    ],
    ids=["ours", "memory", "interrupt", "lost", "late"],
)
def test_what_a_rank_says_of_its_error(error, cause, first) -> None:
    watch = watch_of(0)
    told = _account_of(error, watch)
    assert told == (cause, f"hf-ptq: {watch.launch.name} failed in step 'load'{first}")


def test_a_bug_of_ours_is_told_with_its_trace_first() -> None:
    """What stands last is what stays on the screen."""
    watch = watch_of(0)
    try:
        _ = {}["key"]
    except KeyError as error:
        cause, text = _account_of(error, watch)
    assert cause == "KeyError: 'key'"
    assert text.startswith("Traceback (most recent call last):")
    assert text.splitlines()[-2:] == [
        f"hf-ptq: {watch.launch.name} failed in step 'load': KeyError: 'key'",
        "(last seen: rank 1 in step 'start')",
    ]


def test_a_preview_that_fails_because_a_rank_was_killed_does_not_advise_to_leave_it_out() -> None:
    error = caused(RunError(Problem("the preview failed", "--skip_generate leaves the previews out")), CLOSED)
    cause, text = _account_of(error, watch_of(0))
    assert "the connection to another rank broke" in cause
    assert "--skip_generate" not in text
    own = caused(RunError(Problem("the preview failed", "--skip_generate leaves the previews out")), ValueError("x"))
    assert "--skip_generate" in _account_of(own, watch_of(0))[1]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError(DISK), 2),
        (RunError(DISK), 1),
        (ValueError(), 1),
        (SystemExit(3), 3),
        (SystemExit(0), 1),
        (SystemExit("text"), 1),
        (SystemExit(None), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_the_exit_code_of_a_failure_is_never_0(error, code) -> None:
    assert exit_code(error) == code


# ---- who says it


def leave(watch: Watch, error: BaseException) -> None:
    watch.leave_within = lambda seconds: None  # type: ignore[method-assign]
    with pytest.raises(type(error)), _FailingTogether(watch), _FailingTogether(watch):
        raise error


def test_one_rank_tells_of_an_error_once(capsys) -> None:
    store = dist.HashStore()
    leave(watch_of(1, store=store), ValueError("the first"))
    assert capsys.readouterr().err.count("failed in step 'load': ValueError: the first") == 1
    leave(watch_of(0, store=store), ValueError("the second"))
    assert capsys.readouterr().err == ""
    assert json.loads(store.get(FAILURE))["cause"] == "ValueError: the first"


@pytest.mark.parametrize(
    ("rank", "told"),
    [
        (0, "hf-ptq: the run failed: the disk is full\n    -> free room\n"),
        (1, ""),
        (2, "hf-ptq: {name} ends: the disk is full\n"),
        (3, ""),
    ],
)
def test_what_all_ranks_know_the_first_tells_and_one_of_each_other_node_repeats(capsys, rank, told) -> None:
    store = dist.HashStore()
    watch, error = watch_of(rank, 4, 2, store), RunError(DISK)
    error.is_agreed = True
    leave(watch, error)
    assert capsys.readouterr().err == told.format(name=watch.launch.name)
    assert not store.check([FAILURE])


# ---- before they meet


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The store where the ranks of a run that has not begun would meet."""
    store = dist.HashStore()
    prefixed = dist.PrefixStore(f"{process_group._keys_of_run(0)}/{process_group.WATCH}", store)
    monkeypatch.setattr(process_group, "_connect", lambda launch, timeout, prefix: dist.PrefixStore(prefix, store))
    monkeypatch.setattr(process_group, "_RUNS", itertools.count())
    return prefixed


def test_other_nodes_are_told_and_need_not_wait(meeting) -> None:
    tell_other_nodes(
        Launch(0, 2, 0, 1, 0, 2), "hf-ptq: this request cannot be carried out: no such model\n    -> name it"
    )
    failure: dict[str, Any] = json.loads(meeting.get(FAILURE))
    assert failure["cause"] == "this request cannot be carried out: no such model"
    assert meeting.check([TOLD])
    assert meeting.check([CLEANED])


def test_of_an_error_that_nobody_knows_the_last_line_is_told(meeting) -> None:
    trace = "Traceback (most recent call last):\nImportError: x\nhf-ptq: the run failed with an error (above)"
    tell_other_nodes(Launch(1, 2, 0, 1, 1, 2), trace)
    assert json.loads(meeting.get(FAILURE))["cause"] == "the run failed with an error (above)"


def test_a_rank_leaves_it_to_the_first_to_tell_what_both_have(meeting) -> None:
    other = Launch(1, 2, 0, 1, 1, 2)
    tell_other_nodes(Launch(0, 2, 0, 1, 0, 2), "hf-ptq: no such model")
    assert first_tells(other, 5.0)


def test_a_rank_tells_what_the_first_has_not(meeting, monkeypatch) -> None:
    """Rank 0 beats: it has begun its run."""
    slept: list[float] = []
    monkeypatch.setattr(process_group.time, "sleep", slept.append)
    meeting.set("beat 0", "[1]")
    assert not first_tells(Launch(1, 2, 0, 1, 1, 2), 5.0)
    assert sum(slept) == 0


def test_a_rank_tells_when_nothing_is_heard_of_the_first(meeting, monkeypatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(process_group.time, "sleep", slept.append)
    now = itertools.count()
    monkeypatch.setattr(process_group.time, "monotonic", lambda: next(now) / 2)
    assert not first_tells(Launch(1, 2, 0, 1, 1, 2), 5.0)
    assert slept


def test_ranks_on_one_gpu() -> None:
    process_group._refuse_shared_gpus(["GPU-a", "GPU-b"])
    with pytest.raises(UserError, match="ranks 0, 2 share the GPU GPU-a") as refused:
        process_group._refuse_shared_gpus(["GPU-a", "GPU-b", "GPU-a"])
    assert refused.value.is_agreed, "all ranks find the same, and one tells it"
