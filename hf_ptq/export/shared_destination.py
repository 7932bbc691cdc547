"""One export directory for all ranks: rank 0 makes, names and removes it, every rank writes its files into it.

Whether every node sees what rank 0 sees is found out by trying, before anything is loaded: rank 0 leaves a probe file
where the export will be made, and all look for it. Network file systems show new files late: a rank that does not see
a file lists its directory, which makes them ask the server, for up to SEEN_SECONDS.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from hf_ptq.distributed.agreement import first_decides, together
from hf_ptq.distributed.process_group import DistributedState
from hf_ptq.errors import Problem, RunError, UserError
from hf_ptq.export.destination import Destination, home_of
from hf_ptq.report import Report

SEEN_SECONDS = 60.0
CURE = "put it on storage that all nodes share, under one path"


def unseen(paths: Iterable[Path], seconds: float | None = None) -> list[Path]:
    """Those of `paths` that are not there, after waiting for them."""
    end = time.monotonic() + (SEEN_SECONDS if seconds is None else seconds)
    missing = [path for path in paths if not path.exists()]
    while missing and time.monotonic() < end:
        time.sleep(0.5)
        for parent in dict.fromkeys(path.parent for path in missing):
            with contextlib.suppress(OSError):
                list(parent.iterdir())
        missing = [path for path in missing if not path.exists()]
    return missing


def refuse_unshared_path(state: DistributedState, export_path: Path) -> None:
    """Raise UserError naming the ranks, and their nodes, that do not see or cannot write where the export will be."""
    if state.world_size == 1:
        return

    def leave() -> str:
        probe = home_of(export_path.expanduser().resolve()) / f".hf-ptq-probe-{uuid.uuid4().hex}"
        try:
            probe.touch()
        except OSError as error:
            what = f"--export_path {export_path} cannot be written: {error.strerror}"
            raise UserError(Problem(what, "take another path")) from error
        return str(probe)

    probe = Path(first_decides(state, "leave a probe at the export path", leave))

    def see() -> None:
        if unseen([probe]):
            raise UserError(
                Problem(f"--export_path {export_path}: this node does not see what rank 0 writes there", CURE)
            )
        own = probe.with_name(f"{probe.name}-{state.rank}")
        try:
            own.touch()
            own.unlink()
        except OSError as error:
            what = f"--export_path {export_path} cannot be written here: {error.strerror}"
            raise UserError(Problem(what, CURE)) from error

    try:
        together(state, "see the export path", see)
    finally:
        if state.is_first:
            probe.unlink(missing_ok=True)


class SharedDestination:
    """`Destination` for a run of any number of ranks. `directory`: where all write."""

    def __init__(self, state: DistributedState, path: Path, overwrite: bool, report: Report) -> None:
        self._state = state
        self._own = Destination(path, overwrite, report) if state.is_first else None
        self.directory = Path()

    def __enter__(self) -> Self:
        state, own = self._state, self._own

        def make() -> str:
            assert own is not None
            return str(own.__enter__().directory)

        self.directory = Path(first_decides(state, "make the export directory", make))
        if own is not None and state.watch is not None:
            state.watch.on_abort(own.abandon)
        try:
            together(state, "see the export directory", self._see)
        except RunError as error:
            self.__exit__(RunError, error, None)
            raise
        return self

    def _see(self) -> None:
        if unseen([self.directory]):
            raise RunError(Problem(f"{self.directory}, made by rank 0, is not seen on this node", CURE))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._own is not None:
            self._own.__exit__(kind, error, tb)

    def commit(self, durable: bool = False) -> None:
        """Give the finished directory its final name, once every rank has come here."""
        own = self._own
        together(self._state, "finish the export", lambda: None)
        first_decides(self._state, "name the export", lambda: own.commit(durable) if own is not None else None)
