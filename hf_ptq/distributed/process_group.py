"""The process group of a run: it lives exactly as long as the run.

This version runs one process: `distributed_run` yields the state of rank 0 of 1. Several ranks are refused before
anything starts (cli.py); everything that will be done once per run already asks the state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DistributedState:
    """Where this process stands: rank of world size, and the device it computes on."""

    rank: int
    world_size: int
    device: torch.device


@contextmanager
def distributed_run(device: str) -> Iterator[DistributedState]:
    """The state of this process. `device`: auto, cpu, cuda or cuda:N (`auto`: the first GPU if there is one)."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device("cuda:0" if device == "cuda" else device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    yield DistributedState(0, 1, chosen)
