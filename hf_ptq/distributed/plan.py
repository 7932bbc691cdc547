"""The plan: how the model is laid over the ranks and devices, decided once, in pure code, before weights exist.

Facts in, a plan with its reasons and memory arithmetic out, or a refusal. This version knows one placement: the
whole model on the one device of a single process.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from hf_ptq.errors import Problem, UserError

GIB = 2**30


@dataclass(frozen=True)
class Facts:
    """What the plan depends on. Bytes are of the loaded model, and free on the device that would hold it."""

    model_bytes: int
    largest_unit_bytes: int
    device: str
    free_bytes: int
    world_size: int = 1


@dataclass(frozen=True)
class Plan:
    """The layout of the model, and why."""

    kind: Literal["single"]
    device: str
    expected_bytes: int  # weights and one unit's worth of temporaries
    reasons: tuple[str, ...]


def free_bytes(device: torch.device) -> int:
    """Memory that this process may still take on a device: of the GPU, or of the host as Linux estimates it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def decide_plan(facts: Facts) -> Plan:
    """Raises UserError where no placement fits."""
    needed = facts.model_bytes + facts.largest_unit_bytes
    arithmetic = (
        f"weights {facts.model_bytes / GIB:.2f} GiB + one unit {facts.largest_unit_bytes / GIB:.2f} GiB; "
        f"{facts.free_bytes / GIB:.2f} GiB free on {facts.device}"
    )
    if needed > facts.free_bytes:
        cure = "use a device with more memory" + (", or --device cpu" if facts.device.startswith("cuda") else "")
        raise UserError(Problem(f"the model does not fit: {arithmetic}", cure))
    return Plan("single", facts.device, needed, ("one process: the whole model on one device", arithmetic))
