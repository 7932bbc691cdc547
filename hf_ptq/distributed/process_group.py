"""The process group of a run: it lives exactly as long as the run, and ranks fail together.

`distributed_run` yields where this process stands. Several ranks meet over the store that torchrun offers (or, without
its agent, over one of rank 0); collectives on CPU tensors go over gloo, those on GPU tensors over NCCL. One process
has no group, unless the run shards even over one rank.

An exception that leaves a run of several ranks, `SystemExit` included, ends the process by `os._exit` once it is told:
`destroy_process_group` would wait for peers that never come, and so may the interpreter's own exit. Who tells it is
settled over the store, so that one message is on the screen. No handler for signals is installed, here or anywhere: a
rank that is blocked in C++ would not get to run it, and so survive torchrun's SIGTERM.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from hf_ptq.distributed.launch import Launch, read_launch
from hf_ptq.distributed.watch import FAILURE, SETTLE, Watch, beat_of, tell
from hf_ptq.errors import HfPtqError, Problem, RunError, UserError, as_text

_RUNS = itertools.count()  # of this process: each meets the others under keys of its own

MORE_MEMORY = "lower --batch_size or --calib_seq, or use more ranks"
UNWIND = 4.0  # seconds that a failed rank has to close what it has open, and to be heard before the group is made
CONNECT = timedelta(seconds=60)  # for a store that is there
LATER = timedelta(seconds=10)  # that the watch has before a collective gives up by itself: it knows who is missing
WATCH = "watch"
LOST_PEER = re.compile(r"by peer|broken pipe|remote process exited|recv, got 0 bytes", re.IGNORECASE)


@dataclass(frozen=True)
class DistributedState:
    """Where this process stands among the ranks, and the device it computes on."""

    rank: int
    world_size: int
    device: torch.device
    launch: Launch = field(default_factory=Launch)
    watch: Watch | None = None

    @property
    def is_first(self) -> bool:
        """Rank 0: it resolves, tells and commits."""
        return self.rank == 0

    def enter(self, step: str) -> None:
        """The step that messages about this rank name from now on."""
        if self.watch is not None:
            self.watch.step = step

    def failing_together(self) -> _FailingTogether:
        """A block around work: what leaves it is told to the other ranks before anything is cleaned up."""
        return _FailingTogether(self.watch)


@contextmanager
def distributed_run(
    device: str, timeout_minutes: float = 30, shards_one_rank: bool = False
) -> Iterator[DistributedState]:
    """The state of this process; `device`: auto, cpu, cuda or cuda:N (`auto`: a GPU if there is one).

    `shards_one_rank`: one process gets a group, of itself. Raises UserError where the ranks of this node outnumber its
    GPUs. An exception that leaves the block ends the process, if there are other ranks.
    """
    launch = read_launch()
    if launch.world_size == 1:
        chosen = _choose_device(device, launch)
        if shards_one_rank:
            dist.init_process_group(_backend(chosen), store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield DistributedState(0, 1, chosen, launch)
        finally:
            if shards_one_rank:
                dist.destroy_process_group()
        return
    timeout = timedelta(minutes=timeout_minutes)
    keys = _keys_of_run(next(_RUNS))
    watch = Watch(_connect(launch, timeout, f"{keys}/{WATCH}"), launch, timeout.total_seconds())
    watch.start()
    with _EndingTogether(watch), _FailingTogether(watch):
        watch.step = "choose the device"
        chosen = _choose_device(device, launch)
        state = DistributedState(launch.rank, launch.world_size, chosen, launch, watch)
        state.enter("meet the other ranks")
        with watch.waiting():
            if chosen.type == "cuda":
                _refuse_shared_gpus(_exchange(watch, "GPU", str(torch.cuda.get_device_properties(chosen).uuid)))
            dist.init_process_group(
                _backend(chosen),
                store=_connect(launch, timeout + LATER, f"{keys}/group"),
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=timeout + LATER,
            )  # no device_id: with one, further groups are split off, which crashes in all but a process's first run
            dist.all_reduce(torch.zeros(1, device=chosen))  # NCCL connects now, where a failure can be told
        yield state
        state.enter("end")
        with watch.waiting():
            dist.all_reduce(torch.zeros(1))
        watch.stop()
        dist.destroy_process_group()


def _choose_device(device: str, launch: Launch) -> torch.device:
    """On several ranks `cuda` is the GPU of the rank's own number, or the only one that the launcher shows it."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cuda":
        chosen = torch.device(device)
    else:
        count = torch.cuda.device_count()
        if launch.local_world_size > count > 1:
            what = f"{launch.local_world_size} ranks on node {launch.node}, which has {count} GPUs"
            raise UserError(Problem(what, f"torchrun --nproc_per_node {count}, or --device cpu"))
        chosen = torch.device("cuda", launch.local_rank if count > 1 else 0)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return chosen


def _exchange(watch: Watch, what: str, value: str) -> list[str]:
    """Every rank's value, by rank, before there is a group."""
    watch.announce(f"{what} {watch.launch.rank}", value)
    return [watch.await_value(f"{what} {rank}") for rank in range(watch.launch.world_size)]


def _refuse_shared_gpus(uuids: list[str]) -> None:
    """Raise UserError, on all ranks, where two have one GPU; NCCL would say so less plainly."""
    users: dict[str, list[str]] = {}
    for rank, uuid in enumerate(uuids):
        users.setdefault(uuid, []).append(str(rank))
    shared = {uuid: ranks for uuid, ranks in users.items() if len(ranks) > 1}
    if shared:
        what = "; ".join(f"ranks {', '.join(ranks)} share the GPU {uuid}" for uuid, ranks in shared.items())
        cure = "start as many ranks on a node as it has GPUs, and show each rank its own or all"
        error = UserError(Problem(what, cure))
        error.is_agreed = True
        raise error


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _keys_of_run(number: int) -> str:
    """What the keys of this run start with; torchrun may have started it anew."""
    return f"hf_ptq/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{number}"


def _connect(launch: Launch, timeout: timedelta, prefix: str) -> dist.Store:
    """A connection of its own to the store where the ranks meet; rank 0 opens it where torchrun's agent has not."""
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        launch.world_size,
        is_master=launch.rank == 0 and not has_agent,
        timeout=min(timeout, CONNECT),
        wait_for_workers=False,
        multi_tenant=True,
    )
    store.set_timeout(timeout)
    return dist.PrefixStore(prefix, store)


# --- failing -----------------------------------------------------------------------------------


class _FailingTogether:
    """Tells an exception that passes by: to the other ranks, and on the screen if this rank is to tell it."""

    def __init__(self, watch: Watch | None) -> None:
        self._watch = watch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        watch = self._watch
        if error is None or watch is None or "_hf_ptq_tells" in error.__dict__:
            return
        launch, echoes = watch.launch, False
        watch.leave_within(UNWIND + SETTLE)
        if isinstance(error, HfPtqError) and error.is_agreed:  # all ranks have it
            tells, echoes = launch.rank == 0, launch.node > 0 and launch.local_rank == 0
            message = f"hf-ptq: {launch.name} ends: {_summary(error)}" if echoes else as_text(error)
        else:
            cause, message = _account_of(error, watch)
            tells = watch.publish(cause).rank == launch.rank
        error.__dict__["_hf_ptq_tells"] = tells
        if tells or echoes:
            tell(message, in_torchruns_account=not isinstance(error, UserError))  # it would be there twice


class _EndingTogether:
    """The outermost block of a run of several ranks: an exception ends here, and the process with it."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            return
        self._watch.settle(error.__dict__["_hf_ptq_tells"], SETTLE)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code(error))


def exit_code(error: BaseException) -> int:
    """The exit code that an exception means; never 0."""
    if isinstance(error, HfPtqError):
        return error.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code or 1
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _account_of(error: BaseException, watch: Watch) -> tuple[str, str]:
    """Of an error that this rank alone has: the cause in a line, and who, where, what; a bug of ours with its trace."""
    where = f"hf-ptq: {watch.launch.name} failed in step {watch.step!r}"
    root = error.__cause__ if isinstance(error, RunError) and error.__cause__ else error
    line = str(root).partition("\n")[0].partition(". This is typically")[0]
    if isinstance(root, RuntimeError) and LOST_PEER.search(str(root)):
        cause = "the connection to another rank broke, as when its process is killed"
        return cause, f"{where}: {cause}; {watch.lost_peers()} ({line})"
    if isinstance(root, RuntimeError) and "timed out" in str(root).lower():
        cause = f"a collective was not answered within {watch.timeout_seconds / 60:.3g} minutes (--timeout_minutes)"
        return cause, f"{where}: {cause}; last seen: {watch.others()} ({line})"
    if isinstance(error, HfPtqError):
        return _summary(error), f"{where}: {as_text(error).removeprefix('hf-ptq: ')}"
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        cause = f"out of memory: {error}"
        return cause, f"{where}: {cause}\n    -> {MORE_MEMORY}"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", f"{where}: interrupted"
    trace = "".join(traceback.format_exception(error))
    cause = f"exit with code {error.code}" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
    return cause.partition("\n")[0], f"{trace}{where}: {cause}\n(last seen: {watch.others()})"


def _summary(error: HfPtqError) -> str:
    return error.problems[0].what.partition("\n")[0]


def first_tells(launch: Launch, seconds: float) -> bool:
    """Whether rank 0 failed before the group was made too, and so tells; it may be late, by `seconds` at most."""
    end = time.monotonic() + seconds
    with contextlib.suppress(RuntimeError):  # rank 0's node may be gone, and the store with it
        store = _connect(launch, timedelta(seconds=seconds), f"{_keys_of_run(0)}/{WATCH}")
        while time.monotonic() < end:
            if store.check([FAILURE]):
                return True
            if store.check([beat_of(0)]):
                return False  # it has begun its run
            time.sleep(0.1)
    time.sleep(max(0.0, end - time.monotonic()))
    return False


def tell_other_nodes(launch: Launch, message: str) -> None:
    """This rank failed before the group was made: its agent ends this node's ranks, nothing ends those of others."""
    if launch.num_nodes == 1:
        return
    try:
        store = _connect(launch, timedelta(seconds=5), f"{_keys_of_run(0)}/{WATCH}")
    except RuntimeError:
        return  # the other node is gone already
    watch = Watch(store, launch, 0)
    first = next((line for line in message.splitlines() if "hf-ptq: " in line), message)
    watch.settle(watch.publish(first.rpartition("hf-ptq: ")[2]).rank == launch.rank, UNWIND)
