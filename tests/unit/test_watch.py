"""What one rank's watch sees in the store, what it says, and when it ends the process.

The store is one of this process, other ranks are played by what they write into it, and ending is noted down. Runs of
real ranks are in tests/dist.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hf_ptq.distributed import watch as watching
from hf_ptq.distributed.launch import Launch
from hf_ptq.distributed.watch import CLEANED, FAILURE, TOLD, Watch, tell

TICK = 0.02
START = Callable[..., Watch]


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes that threads have ended this process with."""
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        threading.Event().wait()  # nothing comes after it

    monkeypatch.setattr(watching.os, "_exit", leave)
    monkeypatch.setattr(watching, "INTERVAL", TICK)
    monkeypatch.setattr(watching, "SILENCE", 20 * TICK)
    monkeypatch.setattr(watching, "GONE", 10 * TICK)
    monkeypatch.setattr(watching, "SETTLE_LOST", 2 * TICK)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    return codes


@pytest.fixture
def start(left: list[int]) -> Iterator[START]:
    """Starts watches of ranks over one store, and stops them."""
    started: list[Watch] = []

    def begin(rank: int, store: Any, world: int = 2, nodes: int = 1, timeout: float = 60.0) -> Watch:
        local = world // nodes
        watch = Watch(store, Launch(rank, world, rank % local, local, rank // local, nodes), timeout)
        watch.start()
        started.append(watch)
        return watch

    yield begin
    for watch in started:
        watch._stopping.set()


def wait_for(condition: Callable[[], object], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not condition():
        time.sleep(TICK / 2)
    return bool(condition())


def beat(store: dist.Store, rank: int, counter: int, step: str = "load", entered: int = 0) -> None:
    store.set(f"beat {rank}", json.dumps([counter, f"rank {rank} (node 0, host)", step, entered, "loop.py:7 forward"]))


def failure(rank: int, node: int = 0) -> str:
    return json.dumps({"rank": rank, "node": node, "name": f"rank {rank}", "step": "load", "cause": "the disk is full"})


# ---- a failure of another rank


@pytest.mark.parametrize("order", [(TOLD, CLEANED), (CLEANED, TOLD)])
def test_a_rank_leaves_when_the_message_is_out_and_the_first_has_cleaned(start, left, order) -> None:
    """torchrun ends all ranks of a node as soon as one has left."""
    store = dist.HashStore()
    start(2, store, world=4)
    store.set(FAILURE, failure(1))
    assert not wait_for(lambda: left, 10 * TICK)
    store.set(order[0], "")
    assert not wait_for(lambda: left, 20 * TICK)
    store.set(order[1], "")
    assert wait_for(lambda: left)
    assert left == [1]


def test_the_first_rank_removes_what_the_run_had_made(start, left) -> None:
    store, order = dist.HashStore(), []
    watch = start(0, store)
    watch.on_abort(lambda: order.append(store.check([CLEANED])))
    store.set(TOLD, "")
    store.set(FAILURE, failure(1))
    assert wait_for(lambda: left)
    assert order == [False]
    assert store.check([CLEANED])


def test_a_rank_does_not_wait_forever_for_a_rank_that_is_gone(start, left, monkeypatch) -> None:
    monkeypatch.setattr(watching, "SETTLE", 10 * TICK)
    monkeypatch.setattr(Watch, "leave_within", lambda self, seconds: None)
    store = dist.HashStore()
    start(1, store)
    store.set(FAILURE, failure(0))
    assert wait_for(lambda: left)


@pytest.mark.parametrize(("rank", "echoes"), [(0, False), (2, True), (3, False)])
def test_one_rank_of_each_other_node_says_why_it_ends(start, left, capsys, rank, echoes) -> None:
    store = dist.HashStore()
    for key in (TOLD, CLEANED):
        store.set(key, "")
    start(rank, store, world=4, nodes=2)
    store.set(FAILURE, failure(1))
    assert wait_for(lambda: left)
    told = capsys.readouterr().err
    assert ("ends: rank 1 failed in step 'load': the disk is full" in told) == echoes
    assert bool(told) == echoes


def test_a_failure_of_its_own_is_left_to_the_main_thread(start, left, capsys) -> None:
    watch = start(1, dist.HashStore())
    assert watch.publish("the disk is full").cause == "the disk is full"
    assert not wait_for(lambda: left, 20 * TICK)
    assert capsys.readouterr().err == ""


def test_the_first_to_publish_is_the_failure_on_all_ranks(start) -> None:
    store = dist.HashStore()
    one, other = Watch(store, Launch(0, 2), 60), Watch(store, Launch(1, 2), 60)
    other.step, one.step = "load", "verify"
    first = other.publish("the disk is full")
    assert (first.rank, first.step, first.cause) == (1, "load", "the disk is full")
    assert one.publish("no reply") == first


def test_what_hangs_while_it_ends_is_ended(start, left) -> None:
    start(0, dist.HashStore()).leave_within(2 * TICK)
    assert wait_for(lambda: left)


# ---- ranks that fall silent, or do not arrive


def test_a_rank_whose_beat_stands_still_is_lost(start, left, capsys) -> None:
    store = dist.HashStore()
    beat(store, 1, 5, "calibrate")
    start(0, store)
    assert wait_for(lambda: left)
    assert "no sign of life" in (told := capsys.readouterr().err)
    assert "from rank 1 (node 0, host) in step 'calibrate' (loop.py:7 forward)" in told
    assert json.loads(store.get(FAILURE))["rank"] == 0


def test_a_rank_that_beats_or_has_not_begun_to_is_not_lost(start, left) -> None:
    store = dist.HashStore()
    start(0, store, world=3)  # rank 2 never begins
    for counter in range(60):
        beat(store, 1, counter)
        time.sleep(TICK)
    assert left == []


def test_a_process_that_was_stopped_finds_nobody_silent(start, left, monkeypatch) -> None:
    """Ctrl-Z, or a frozen container: the others had no time to beat either."""
    store, stopped = dist.HashStore(), [0.0]
    real = time.monotonic
    monkeypatch.setattr(watching.time, "monotonic", lambda: real() + stopped[0])
    start(0, store)
    for counter in range(60):
        beat(store, 1, counter)
        stopped[0] += 1000.0 * (counter == 30)
        time.sleep(TICK)
    assert left == []


def test_who_does_not_arrive_is_named_after_the_timeout(start, left, capsys) -> None:
    store = dist.HashStore()
    watch = start(0, store, world=3, timeout=10 * TICK)
    watch.step = "take the ranges"
    with watch.waiting():
        for counter in range(300):
            beat(store, 1, counter, "take the ranges", entered=1)
            beat(store, 2, counter, "calibrate", entered=0)
            if left:
                break
            time.sleep(TICK)
    assert left == [1]
    told = capsys.readouterr().err
    assert "waited 0.00333 minutes in step 'take the ranges' for rank 2 (node 0, host) in step 'calibrate'" in told
    assert "(loop.py:7 forward) (--timeout_minutes)" in told
    assert "rank 1" not in told


def test_a_wait_that_has_ended_is_not_counted(start, left) -> None:
    store = dist.HashStore()
    watch = start(0, store, timeout=5 * TICK)
    with watch.waiting():
        pass
    for counter in range(20):
        beat(store, 1, counter)
        time.sleep(TICK)
    assert left == []


# ---- the store


class Broken:
    """A store whose connection breaks, or that gives no answer at all."""

    def __init__(self, happens: Callable[[], None]) -> None:
        self.asked = 0
        self._happens = happens

    def set(self, key: str, value: str) -> None:
        self.asked += 1
        self._happens()

    check = get = set


def break_off() -> None:
    raise dist.DistNetworkError("Failed to recv, got 0 bytes")


def test_a_store_that_is_gone_ends_the_run_and_is_asked_once(start, left, capsys) -> None:
    store = Broken(break_off)
    watch = start(0, store)
    assert wait_for(lambda: left)
    assert watch.publish("it is over").rank == 0
    assert store.asked == 1
    assert "the rendezvous store is gone, and its node with it (Failed to recv, got 0 bytes)" in capsys.readouterr().err


def test_a_store_that_is_mute_ends_the_run(start, left, capsys, monkeypatch) -> None:
    """Its node has lost its power: the looking thread waits for an answer until TCP gives up."""
    monkeypatch.setattr(watching, "SETTLE_LOST", 60.0)  # there is nothing to wait for
    start(0, Broken(threading.Event().wait))
    assert wait_for(lambda: left)
    assert "failed in step 'start': the rendezvous store is mute for" in capsys.readouterr().err


# ---- torchrun's account


def test_torchrun_takes_the_rank_that_tells_for_the_cause(tmp_path, monkeypatch, capsys) -> None:
    """Also against a lower rank that ended in the same second."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    tell("hf-ptq: rank 1 failed")
    tell("hf-ptq: something that comes later")
    assert capsys.readouterr().err.splitlines() == ["hf-ptq: rank 1 failed", "hf-ptq: something that comes later"]
    silent, telling = ProcessFailure(0, 1, 1, str(tmp_path / "none")), ProcessFailure(1, 2, 1, str(file))
    assert telling.message["message"] == "hf-ptq: rank 1 failed"  # type: ignore[index]
    assert min((silent, telling), key=lambda one: one.timestamp) is telling


def test_a_user_error_is_not_told_again_by_torchrun(tmp_path, monkeypatch) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    tell("hf-ptq: this request cannot be carried out", in_torchruns_account=False)
    assert not file.exists()
