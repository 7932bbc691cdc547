"""Calibration statistics: flat tensors with a declared reduction, filled in place, reduced in a few collectives.

An algorithm declares what it needs (`StatisticSpec`: how many numbers, how they are combined over batches and over
ranks) and gets a view into one flat fp32 tensor per (reduction, group). Observers write into the *pending* tensor
of the batch at hand; `commit` folds it into the total when the batch has finished, `discard` forgets it, so that a
batch that ran out of memory and is repeated counts once. Reducing over ranks is one collective per flat tensor,
whatever the number of quantizers. Nothing here knows modules or process groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch

Reduction = Literal["max", "sum", "highest"]
Group = Literal["data", "expert"]
START: dict[Reduction, float] = {"max": 0.0, "sum": 0.0, "highest": -math.inf}
# Reduces a flat tensor over the ranks of a group, in place, by a sum or a maximum.
Reducer = Callable[[torch.Tensor, Reduction, Group], None]


@dataclass(frozen=True)
class StatisticSpec:
    """`size` numbers under `key`. `max` is of values that are never negative, and starts from zero as `sum` does;
    `highest` is of any values."""

    key: str
    size: int
    reduction: Reduction
    group: Group = "data"


class Statistics:
    """The statistics of one calibration on one device."""

    def __init__(self, specs: Iterable[StatisticSpec], device: torch.device) -> None:
        self._places: dict[str, tuple[tuple[Reduction, Group], slice]] = {}
        sizes: dict[tuple[Reduction, Group], int] = {}
        for spec in specs:
            assert spec.key not in self._places, f"two statistics named {spec.key}"
            kind = (spec.reduction, spec.group)
            start = sizes.get(kind, 0)
            self._places[spec.key] = kind, slice(start, start + spec.size)
            sizes[kind] = start + spec.size
        self._pending = {kind: torch.full((size,), START[kind[0]], device=device) for kind, size in sizes.items()}
        # Sums in fp64: counts stay exact, in whatever order batches and ranks are added.
        self._total = {
            kind: torch.full(
                (size,), START[kind[0]], device=device, dtype=torch.float64 if kind[0] == "sum" else torch.float32
            )
            for kind, size in sizes.items()
        }

    def pending(self, key: str) -> torch.Tensor:
        """fp32 [size]: the running value of the batch at hand; observers update it in place."""
        kind, place = self._places[key]
        return self._pending[kind][place]

    def total(self, key: str) -> torch.Tensor:
        """[size]: the value over all committed batches (over all ranks, once reduced); fp32, sums fp64."""
        kind, place = self._places[key]
        return self._total[kind][place]

    def commit(self) -> None:
        """The batch has finished: fold its values into the totals. NaN survives a maximum."""
        for kind, pending in self._pending.items():
            total = self._total[kind]
            if kind[0] == "sum":
                total += pending
            else:
                torch.maximum(total, pending, out=total)
            pending.fill_(START[kind[0]])

    def discard(self) -> None:
        """Forget the values of the batch at hand."""
        for kind, pending in self._pending.items():
            pending.fill_(START[kind[0]])

    def reduce(self, reducer: Reducer) -> None:
        """Combine the totals of all ranks: one call of `reducer` per flat tensor."""
        for (reduction, group), total in self._total.items():
            reducer(total, "sum" if reduction == "sum" else "max", group)
