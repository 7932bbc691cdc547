"""Agreement: the ranks tell each other how a step went, and go on, or raise, together.

`together(state, step, work)` runs `work` on every rank; `first_decides` on rank 0 alone, whose result all get. Either
way no rank leaves the step before every rank's outcome is known to all, and if any raised, all raise one error that
names the ranks and what they said. `work` itself must not contain a collective that only some ranks would reach.

What is exchanged is text (JSON) and flat tensors over gloo, a fixed number of collectives per call: nothing is
pickled, and nothing large is gathered. With one process there is nobody to tell; an error names the step all the same.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hf_ptq.distributed.process_group import MORE_MEMORY, DistributedState
from hf_ptq.errors import HfPtqError, Problem, RunError, UserError

Result = TypeVar("Result")


def together(state: DistributedState, step: str, work: Callable[[], Result], for_all: bool = False) -> Result:
    """The result of `work`, once every rank has one.

    Raises on all ranks if any rank's `work` raised: UserError if all that failed did so with one, else RunError. What
    the user did wrong is said without the rank's name where one rank works `for_all`.
    """
    state.enter(step)
    result, error = None, None
    try:
        result = work()
    except Exception as raised:
        if state.world_size == 1:
            raised.add_note(f"in step: {step}")
            raise
        if isinstance(raised, HfPtqError) and raised.is_agreed:
            raise
        error = raised
    if state.world_size > 1:
        outcomes = gather_json(state, None if error is None else _as_json(error, state))
        if any(outcomes):
            raise _agreed_error(step, outcomes, for_all) from error
    return result  # type: ignore[return-value]


def one_first(state: DistributedState, step: str, work: Callable[[], Result]) -> Result:
    """As `together`, but rank 0 is done before one rank of each other node begins, and those before the rest.

    They may fill a cache: of their node, or of all nodes.
    """
    turn = 0 if state.is_first else 1 if state.launch.local_rank == 0 else 2
    results = [together(state, step, lambda now=now: work() if now == turn else None) for now in range(3)]
    return results[turn]  # type: ignore[return-value]


def first_decides(state: DistributedState, step: str, work: Callable[[], Any], is_long: bool = False) -> Any:
    """The JSON-able result of `work`, which rank 0 alone runs. If it raises, all ranks raise that.

    `is_long`: it may take longer than a rank waits for others; as long as rank 0 lives, the others are patient.
    """
    if is_long and state.watch is not None:
        work = _announced(state, step, work)
    found = together(state, step, work if state.is_first else lambda: None, for_all=True)
    if state.world_size == 1:
        return found
    return json.loads(_broadcast_text(state, json.dumps(found)))


def _announced(state: DistributedState, step: str, work: Callable[[], Any]) -> Callable[[], Any]:
    """`work`, whose end rank 0 tells the others over the store; they wait here, in no collective that has a timeout."""
    watch, key = state.watch, f"done {step}"
    assert watch is not None

    def announced() -> Any:
        try:
            return work()
        finally:
            watch.announce(key)

    if not state.is_first:
        state.enter(step)
        watch.await_value(key)
    return announced


def _as_json(error: Exception, state: DistributedState) -> dict[str, Any]:
    if isinstance(error, HfPtqError):
        problems = [[p.what, p.cure] for p in error.problems]
    elif isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        problems = [[f"out of memory: {error}", MORE_MEMORY]]
    else:
        trace = "".join(traceback.format_exception(error)).rstrip()
        problems = [[f"{type(error).__name__}: {error}\n{trace}", ""]]
    return {"rank": state.launch.name, "user": isinstance(error, UserError), "problems": problems}


def _agreed_error(step: str, outcomes: Sequence[dict[str, Any] | None], for_all: bool) -> HfPtqError:
    """One error for all ranks. What all ranks say is said once; what some say is said with their names."""
    failed = [outcome for outcome in outcomes if outcome]
    said: dict[tuple[str, str], list[str]] = {}
    for outcome in failed:
        for what, cure in dict.fromkeys(map(tuple, outcome["problems"])):
            said.setdefault((what, cure), []).append(outcome["rank"])
    is_users = all(outcome["user"] for outcome in failed)
    problems = []
    for (what, cure), ranks in said.items():
        nameless = len(ranks) == len(outcomes) or (is_users and for_all)
        problems.append(Problem(what if nameless else f"{_some(ranks)}, step {step!r}: {what}", cure))
    error = (UserError if is_users else RunError)(*problems)
    error.is_agreed = True
    return error


def _some(ranks: Sequence[str]) -> str:
    return ", ".join(ranks[:3]) + (f" and {len(ranks) - 3} more" if len(ranks) > 3 else "")


# --- exchanging ----------------------------------------------------------------------------------


def gather_json(state: DistributedState, value: Any) -> list[Any]:
    """Every rank's JSON-able value, by rank; two collectives."""
    if state.world_size == 1:
        return [value]
    own = _bytes_of(json.dumps(value))
    sizes = torch.zeros(state.world_size, 1, dtype=torch.int64)
    with _waiting(state):
        dist.all_gather(list(sizes), torch.tensor([len(own)]))
        texts = torch.zeros(state.world_size, int(sizes.max()), dtype=torch.uint8)
        padded = torch.zeros_like(texts[0])
        padded[: len(own)] = own
        dist.all_gather(list(texts), padded)
    return [json.loads(row[: int(size)].numpy().tobytes()) for row, size in zip(texts, sizes, strict=True)]


def _broadcast_text(state: DistributedState, text: str) -> str:
    own = _bytes_of(text)
    size = torch.tensor([len(own)])
    with _waiting(state):
        dist.broadcast(size, 0)
        data = own if state.is_first else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0)
    return data.numpy().tobytes().decode()


def broadcast(state: DistributedState, tensor: torch.Tensor) -> torch.Tensor:
    """Rank 0's CPU tensor on all ranks; the others' has its dtype and any shape."""
    if state.world_size == 1:
        return tensor
    shape = json.loads(_broadcast_text(state, json.dumps(list(tensor.shape))))
    received = tensor.contiguous() if state.is_first else torch.empty(shape, dtype=tensor.dtype)
    with _waiting(state):
        dist.broadcast(received, 0)
    return received


def least(state: DistributedState, number: int) -> int:
    """The smallest of the ranks' numbers."""
    return -most(state, -number)


def most(state: DistributedState, number: int) -> int:
    """The largest of the ranks' numbers."""
    if state.world_size == 1:
        return number
    value = torch.tensor([number])
    with _waiting(state):
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return int(value)


def reduce_over_ranks(state: DistributedState, flat: torch.Tensor, reduction: str) -> None:
    """Combine a flat tensor of all ranks in place. A NaN counts as infinity: backends lose it in a maximum."""
    if state.world_size == 1:
        return
    if reduction == "max":
        flat.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    with _waiting(state):
        dist.all_reduce(flat, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM)


def same_everywhere(state: DistributedState, step: str, facts: Mapping[str, Any]) -> None:
    """Raise UserError on all ranks where a fact differs between them, naming the ranks and what each has."""
    told = gather_json(state, dict(facts))

    def compare() -> None:
        problems = []
        for key in dict.fromkeys(key for one in told for key in one):
            values: dict[str, list[int]] = {}
            for rank, one in enumerate(told):
                values.setdefault(json.dumps(one.get(key), sort_keys=True), []).append(rank)
            if len(values) > 1:
                listed = "; ".join(f"{value[:200]} on rank {_numbers(ranks)}" for value, ranks in values.items())
                problems.append(Problem(f"the ranks do not agree on {key}: {listed}", "start them all alike"))
        if problems:
            raise UserError(*problems)

    together(state, step, compare)


def _numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")


def _bytes_of(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _waiting(state: DistributedState) -> AbstractContextManager[object]:
    """Nobody watches a group that a script has made for itself."""
    return nullcontext() if state.watch is None else state.watch.waiting()
