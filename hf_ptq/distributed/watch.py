"""Every rank learns within seconds that another one failed, fell silent, or does not arrive.

torchrun ends the ranks of its own node when one of them dies; those of other nodes it leaves in their collectives. So
each rank meets the others in the rendezvous store, under keys of this run:

    failure        what failed first, and where (compare-and-set: one rank is the first)
    beat RANK      a counter; the rank's name and step; how many agreements it has entered; where in the code it is
    told, cleaned  its message is out; rank 0 has removed what the run had made. The ranks leave only then: torchrun
                   ends all ranks of a node as soon as one has left

Two threads do it. One looks: every INTERVAL it writes its own beat and reads the others'. The other judges: a failure,
a beat that stands still for SILENCE, a store that is gone or mute for as long, or an agreement that this rank has
waited for longer than the timeout end the process by `os._exit`: the main thread may sit in a collective that never
returns, so nothing else would. Two, because a store whose node has lost its power answers neither yes nor no. Time is
that in which this process ran: what had been stopped as a whole (Ctrl-Z, a frozen container) finds nobody silent.

The looking thread has a connection to the store of its own: the main thread's may be blocked in a wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from hf_ptq.distributed.launch import Launch

Answer = TypeVar("Answer")

INTERVAL = 0.5  # seconds between two looks
GONE = 5.0  # seconds after which a run ends whose store is gone; one that fails by itself is faster
SILENCE = 10.0  # seconds after which a rank counts as lost
LISTEN = 3.0  # seconds after which it shows who is quiet
SETTLE = 8.0  # seconds that a rank waits for the message and for rank 0 before it leaves
SETTLE_LOST = 2.0  # the same where a rank is lost: it may be one of these two
FAILURE = "failure"
TOLD = "told"
CLEANED = "cleaned"
START = "start"
MAX_NAMED = 8


@dataclass(frozen=True)
class Failure:
    """What ended the run: where, and why in a line."""

    rank: int
    node: int
    name: str
    step: str
    cause: str


@dataclass(frozen=True)
class Seen:
    """The last that was heard of a rank."""

    counter: int
    name: str
    step: str = START
    entered: int = 0
    place: str = ""
    since: float = 0.0  # by the clock of the watch

    @property
    def where(self) -> str:
        """For messages: step 'load' (FILE:LINE FUNCTION)."""
        return f"step {self.step!r}" + (f" ({self.place})" if self.place else "")


def _unheard(rank: int, since: float = 0.0) -> Seen:
    return Seen(-1, f"rank {rank}", since=since)


class Watch:
    """The watching threads of one rank. `start` it before the process group exists, `stop` it before that ends."""

    def __init__(self, store: dist.Store, launch: Launch, timeout_seconds: float) -> None:
        self.launch = launch
        self.timeout_seconds = timeout_seconds
        self.step = START
        self._store = store
        self._lock = threading.Lock()  # of the store's connection
        self._clock = 0.0  # seconds that this process ran since the start
        self._heard = 0.0  # when the store last answered
        self._gone = ""  # how its connection ended
        self._seen = {rank: _unheard(rank) for rank in range(launch.world_size) if rank != launch.rank}
        self._entered = 0
        self._waiting_since: float | None = None
        self._failure: Failure | None = None  # what failed first, as far as this rank knows
        self._cleanups: list[Callable[[], None]] = []
        self._main = threading.get_ident()
        self._stopping = threading.Event()
        works = {"looks": self._keep_looking, "judges": self._keep_judging}
        self._threads = [threading.Thread(target=w, name=f"hf-ptq {name}", daemon=True) for name, w in works.items()]

    def start(self) -> None:
        """Begin to watch. The calling thread is the one that works."""
        self._main = threading.get_ident()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads; the run has succeeded."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(SETTLE)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The main thread waits for the other ranks inside the block; for `timeout_seconds` at most."""
        self._entered += 1
        self._waiting_since = self._clock
        try:
            yield
        finally:
            self._waiting_since = None

    def announce(self, key: str, value: str = "") -> None:
        """Leave a value for the other ranks."""
        self._ask(partial(_put, key=key, value=value), None)

    def await_value(self, key: str) -> str:
        """What another rank announces, however long that takes: if it fails or falls silent, this process ends."""
        while (value := self._ask(partial(_get, key=key), None)) is None:
            time.sleep(INTERVAL / 10)
        return value

    def on_abort(self, cleanup: Callable[[], None]) -> None:
        """Call `cleanup` before a thread of the watch ends the process."""
        self._cleanups.append(cleanup)

    def publish(self, cause: str) -> Failure:
        """Say that this rank failed, unless another was first; returns what failed first."""
        if self._failure is None:
            own = Failure(self.launch.rank, self.launch.node, self.launch.name, self.step, cause)
            self._failure = own  # the judge leaves the end to this thread
            first = self._ask(lambda store: store.compare_set(FAILURE, "", json.dumps(asdict(own))), None)
            if first is not None:
                self._failure = Failure(**json.loads(first))
        return self._failure

    def settle(self, tells: bool, seconds: float) -> None:
        """Wait until the message is out and rank 0 has removed what the run had made; at most so many seconds.

        `tells`: the message was this rank's. On rank 0 its own removal is done.
        """
        end = time.monotonic() + seconds
        missing = {TOLD: tells, CLEANED: self.launch.rank == 0}
        while missing and not self._gone and time.monotonic() < end:
            for key, is_mine in list(missing.items()):
                if self._ask(partial(_set if is_mine else _has, key=key), True):
                    del missing[key]
            time.sleep(INTERVAL / 10)
        is_news = tells and seconds > SETTLE_LOST  # what is lost, the others see by themselves
        if is_news and self.launch.num_nodes > 1 and not self._gone:
            time.sleep(2 * INTERVAL)  # the store may end with this node: the others shall have looked

    def leave_within(self, seconds: float) -> None:
        """End the process when the time is over, wherever its threads are then: also in a store that is mute."""
        timer = threading.Timer(seconds, os._exit, [1])
        timer.daemon = True
        timer.start()

    def others(self) -> str:
        """Where the other ranks were last seen, for a message."""
        return self._named(self._seen)

    def lost_peers(self) -> str:
        """Which ranks may be those whose connection broke: on several nodes this listens for a while who is quiet."""
        quiet: list[int] = []
        if self.launch.num_nodes > 1:  # on one, torchrun ends this process soon, and names the rank
            asked = self._clock
            time.sleep(LISTEN)
            quiet = [rank for rank, seen in self._seen.items() if seen.since <= asked + INTERVAL]
        return f"no sign of life since from {self._named(quiet)}" if quiet else f"last seen: {self.others()}"

    def _named(self, ranks: Iterable[int]) -> str:
        """RANK in step 'load' (FILE:LINE FUNCTION); RANK, RANK in ...: ranks in one place stand together."""
        places: dict[str, list[str]] = {}
        for rank in ranks:
            seen = self._seen[rank]
            places.setdefault(seen.where, []).append(seen.name)
        cut = {
            where: ", ".join(names[:MAX_NAMED] + ["..."] * (len(names) > MAX_NAMED)) for where, names in places.items()
        }
        return "; ".join(f"{names} in {where}" for where, names in cut.items())

    # --- looking -----------------------------------------------------------------------------------

    def _keep_looking(self) -> None:
        counter = 0
        while not self._stopping.wait(INTERVAL) and not self._gone:
            counter += 1
            failure = self._ask(partial(self._look, counter=counter), None)
            if failure is not None:
                self._failure = failure
            if not self._gone:
                self._heard = self._clock

    def _ask(self, question: Callable[[dist.Store], Answer], otherwise: Answer) -> Answer:
        """What the store answers; `otherwise` once it is gone: torch does not connect again, and tells at length."""
        with self._lock:
            try:
                return otherwise if self._gone else question(self._store)
            except RuntimeError as error:  # torch's errors of stores
                self._gone = str(error).partition("\n")[0]
                return otherwise

    def _look(self, store: dist.Store, counter: int) -> Failure | None:
        """Write this rank's beat and read the others'; what has failed, if anything."""
        beat = json.dumps([counter, self.launch.name, self.step, self._entered, _place_of(self._main)])
        store.set(beat_of(self.launch.rank), beat)
        if store.check([FAILURE]):
            return Failure(**json.loads(store.get(FAILURE)))
        for rank, seen in self._seen.items():
            key = beat_of(rank)
            told = json.loads(store.get(key)) if store.check([key]) else None
            if told is None:  # it has not begun to beat, and so is not silent: the timeout is for it
                self._seen[rank] = _unheard(rank, self._clock)
            elif told[0] != seen.counter:
                self._seen[rank] = Seen(*told, since=self._clock)
        return None

    # --- judging -----------------------------------------------------------------------------------

    def _keep_judging(self) -> None:
        last = time.monotonic()
        while not self._stopping.wait(INTERVAL):
            now = time.monotonic()
            self._clock += min(now - last, 2 * INTERVAL)
            last = now
            self._judge()

    def _judge(self) -> None:
        """End the process if the run cannot go on. A failure of its own the main thread ends itself."""
        failure = self._failure
        if failure is not None:
            if failure.rank != self.launch.rank:
                self._end_after(failure)
        elif self._clock - self._heard > (GONE if self._gone else SILENCE):
            what = f"is gone, and its node with it ({self._gone})" if self._gone else f"is mute for {SILENCE:.0f} s"
            told = f"hf-ptq: {self.launch.name} failed in step {self.step!r}: the rendezvous store {what}"
            self._gone = what  # there is nothing to settle
            self._end(told, tells=True, seconds=SETTLE_LOST)
        elif lost := self._lost():
            tells = self.publish(lost).rank == self.launch.rank
            self._end(f"hf-ptq: the run failed: {lost}" if tells else "", tells, SETTLE_LOST)

    def _lost(self) -> str:
        """Why the run cannot go on, as far as the beats show; empty if it can."""
        now = self._clock
        silent = [rank for rank, seen in self._seen.items() if now - seen.since > SILENCE]
        if silent:
            return f"no sign of life for {SILENCE:.0f} s from {self._named(silent)}, as {self.launch.name} sees it"
        since = self._waiting_since
        if since is None or now - since <= self.timeout_seconds:
            return ""
        late = [rank for rank, seen in self._seen.items() if seen.entered < self._entered]
        named = self._named(late) or f"a collective that all ranks have entered: {self.others()}"
        waited = f"{self.launch.name} waited {self.timeout_seconds / 60:.3g} minutes in step {self.step!r}"
        return f"{waited} for {named} (--timeout_minutes)"

    def _end_after(self, failure: Failure) -> None:
        """Another rank failed. It has said so on its own node; on others one rank repeats it."""
        repeats = failure.node != self.launch.node and self.launch.local_rank == 0
        told = f"hf-ptq: {self.launch.name} ends: {failure.name} failed in step {failure.step!r}: {failure.cause}"
        self._end(told if repeats else "", tells=False, seconds=SETTLE)

    def _end(self, message: str, tells: bool, seconds: float) -> None:
        self.leave_within(seconds + 1)
        if message:
            tell(message)
        for cleanup in self._cleanups:
            with contextlib.suppress(OSError):
                cleanup()
        self.settle(tells, seconds)
        os._exit(1)


def beat_of(rank: int) -> str:
    """The key of a rank's beat."""
    return f"beat {rank}"


def _set(store: dist.Store, key: str) -> bool:
    store.set(key, "")
    return True


def _has(store: dist.Store, key: str) -> bool:
    return bool(store.check([key]))


def _put(store: dist.Store, key: str, value: str) -> None:
    store.set(key, value)


def _get(store: dist.Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def _place_of(thread: int) -> str:
    """Where in the code a thread is: FILE:LINE FUNCTION."""
    frame = sys._current_frames().get(thread)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}" if frame else ""


def tell(message: str, in_torchruns_account: bool = True) -> None:
    """Show a message, and let torchrun show it in its own account of the failure."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not in_torchruns_account or not path or Path(path).exists():
        return
    # torchrun counts whole seconds, and of ranks that ended in the same it takes the lowest for the cause.
    extra = {"timestamp": str(int(time.time()) - 1), "py_callstack": message}
    text = json.dumps({"message": {"message": message, "extraInfo": extra}})
    unfinished = Path(f"{path}.tmp")
    with contextlib.suppress(OSError):
        unfinished.write_text(text, encoding="utf-8")
        unfinished.rename(path)  # torchrun may end this process at any moment, and cannot read the half of it
