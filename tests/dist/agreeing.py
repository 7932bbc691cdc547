"""Two ranks in one process group go through what may happen between them; each leaves what it was told as JSON.

    torchrun --nproc_per_node 2 agreeing.py SOURCE DIRECTORY

An agreed error is raised on every rank at the same point, so a rank can catch it and go on to the next case.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hf_ptq import sourcing
from hf_ptq.checkpoint.headers import Beginning
from hf_ptq.config import RunConfig
from hf_ptq.distributed import agreement
from hf_ptq.distributed.process_group import DistributedState, distributed_run
from hf_ptq.errors import HfPtqError, Problem, RunError, UserError
from hf_ptq.export import shared_destination
from hf_ptq.report import Report

SOURCE, DIRECTORY = Path(sys.argv[1]), Path(sys.argv[2])
Case = Callable[[DistributedState], Any]


def raise_on(ranks: tuple[int, ...], error: Exception) -> Case:
    def work(state: DistributedState) -> None:
        if state.rank in ranks:
            raise error

    return lambda state: agreement.together(state, "the step", lambda: work(state), for_all=False)


def first_decides(state: DistributedState) -> Any:
    return agreement.first_decides(state, "decide", lambda: {"text": "größer", "numbers": [1, 2.5, None]})


def long_decision(state: DistributedState) -> Any:
    """Rank 0 takes longer than a rank waits for others; it is alive, so they wait."""
    watch = state.watch
    timeout, watch.timeout_seconds = watch.timeout_seconds, 1.0
    try:
        return agreement.first_decides(state, "fetch", lambda: time.sleep(4) or "fetched", is_long=True)
    finally:
        watch.timeout_seconds = timeout


def one_first(state: DistributedState) -> Any:
    file = DIRECTORY / "cache"

    def work() -> bool:
        was_there = file.exists()
        file.touch()
        return was_there

    return agreement.gather_json(state, agreement.one_first(state, "fill", work))


def first_refuses(state: DistributedState) -> Any:
    def refuse() -> None:
        raise UserError(Problem("no such model", "name another"))

    return agreement.first_decides(state, "decide", refuse)


def nested(state: DistributedState) -> Any:
    def inner() -> None:
        agreement.together(state, "inner", lambda: 1 / (1 - state.rank))

    return agreement.together(state, "outer", inner)


def gather(state: DistributedState) -> Any:
    return agreement.gather_json(state, "x" * 1000 * state.rank)


def broadcast(state: DistributedState) -> Any:
    own = torch.arange(6).view(2, 3) if state.is_first else torch.empty(0, dtype=torch.int64)
    return agreement.broadcast(state, own).tolist()


def numbers(state: DistributedState) -> Any:
    return [agreement.least(state, state.rank + 3), agreement.most(state, state.rank + 3)]


def reduce(state: DistributedState) -> Any:
    largest = torch.tensor([1.0, 5.0, 2.0]) if state.is_first else torch.tensor([4.0, 3.0, torch.nan])
    total = torch.tensor([2.0**24, 1.0], dtype=torch.float64)
    agreement.reduce_over_ranks(state, largest, "max")
    agreement.reduce_over_ranks(state, total, "sum")
    return [list(map(str, largest.tolist())), total.tolist()]


def other_options(state: DistributedState) -> Any:
    facts = {"the option calib_seq": 512 + state.rank, "the version of torch": "2"}
    return agreement.same_everywhere(state, "compare the ranks", facts)


def config(**changes: Any) -> RunConfig:
    return RunConfig(str(SOURCE), DIRECTORY / "export", device="cpu", **changes)


def unseen_by_rank_1(name: str, run: Case) -> Case:
    """`run`, while rank 1 does not see files of that name."""

    def case(state: DistributedState) -> Any:
        real = shared_destination.unseen
        hidden = lambda paths: [p for p in paths if name in str(p)]  # noqa: E731
        for module in (shared_destination, sourcing):
            module.unseen = real if state.is_first else hidden
        try:
            return run(state)
        finally:
            for module in (shared_destination, sourcing):
                module.unseen = real

    return case


def see_export(state: DistributedState) -> Any:
    return shared_destination.refuse_unshared_path(state, DIRECTORY / "export")


def see_source(state: DistributedState) -> Any:
    return str(sourcing.resolve(config(), state, silent()).directory)


def weights_that_came(state: DistributedState, unseen_name: str | None = None) -> Any:
    """The source after a download of its weights, which here were on the disk all the time."""
    source = sourcing.resolve(config(), state, silent())
    expected = replace(source, elsewhere={file: Beginning(file, b"", 1) for file in source.weight_files})

    def fetch(state: DistributedState) -> Any:
        fetched = sourcing.fetch_weights(state, expected, silent())
        return [fetched.as_found == source.as_found, dict(fetched.elsewhere)]

    real, sourcing.download = sourcing.download, lambda _: None
    try:
        return (unseen_by_rank_1(unseen_name, fetch) if unseen_name else fetch)(state)
    finally:
        sourcing.download = real


def other_config_on_rank_1(state: DistributedState) -> Any:
    return str(sourcing.resolve(config(calib_seq=512 + state.rank), state, silent()).directory)


def silent() -> Report:
    return Report(Console(quiet=True), verbose=False)


def destination(state: DistributedState) -> Any:
    """Every rank writes into one directory, which is there under its name when all have come to the commit."""
    with shared_destination.SharedDestination(state, DIRECTORY / "export", False, silent()) as shared:
        (shared.directory / f"of-rank-{state.rank}").touch()
        assert not (DIRECTORY / "export").exists()
        shared.commit()
    return sorted(path.name for path in (DIRECTORY / "export").iterdir())


def failing_destination(state: DistributedState) -> Any:
    try:
        with shared_destination.SharedDestination(state, DIRECTORY / "failed", False, silent()) as shared:
            (shared.directory / f"of-rank-{state.rank}").touch()
            agreement.together(state, "write", lambda: 1 / (1 - state.rank))
    except RunError:
        agreement.most(state, 0)  # rank 0 has left the block, and removed it
        return sorted(path.name for path in DIRECTORY.glob("*failed*"))


CASES: dict[str, Case] = {
    "one rank has a bug": raise_on((1,), ValueError("the reason")),
    "all ranks refuse": raise_on((0, 1), UserError(Problem("not this", "but that"))),
    "one refuses, one fails": lambda state: (
        raise_on((0,), UserError("refused")) if state.is_first else raise_on((1,), RunError("failed"))
    )(state),
    "first decides": first_decides,
    "first refuses": first_refuses,
    "one first": one_first,
    "a long decision": long_decision,
    "nested": nested,
    "gather": gather,
    "broadcast": broadcast,
    "numbers": numbers,
    "reduce": reduce,
    "other options": other_options,
    "see the export": see_export,
    "an unseen export": unseen_by_rank_1(".hf-ptq-probe", see_export),
    "see the source": see_source,
    "an unseen source": unseen_by_rank_1("config.json", see_source),
    "unseen weights": unseen_by_rank_1("model.safetensors", see_source),
    "weights that came": weights_that_came,
    "unseen weights that came": lambda state: weights_that_came(state, "model.safetensors"),
    "another config": other_config_on_rank_1,
    "destination": destination,
    "failing destination": failing_destination,
}


def main() -> None:
    told: dict[str, Any] = {}
    with distributed_run("cpu") as state:
        for name, case in CASES.items():
            try:
                told[name] = case(state)
            except HfPtqError as error:
                told[name] = f"{type(error).__name__}: {error}"
    (DIRECTORY / f"rank-{state.rank}.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main()
    os._exit(0)
