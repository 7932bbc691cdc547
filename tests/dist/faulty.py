"""`hf-ptq` with a fault built in: the rank of FAULT_RANK breaks in the way FAULT_KIND when it comes to FAULT_STEP.

    FAULT_DIRECTORY     where every rank leaves its process id and its launcher's (process-RANK), the fault its moment
    FAULT_DELAY         seconds that the rank waits at the step before it breaks, so that its peers come to wait for it
    FAULT_PEERS         "compute": the forwards of the other ranks take a minute from the second on
    FAULT_LATE_SECONDS  seconds after which the rank of FAULT_RANK starts its run

The kinds: raise, kill (SIGKILL), exit (`sys.exit(3)`), memory (out of memory on a GPU), hang, and node (SIGKILL of the
launcher and of all ranks of its node).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

DIRECTORY = Path(os.environ["FAULT_DIRECTORY"])
RANK = os.environ.get("RANK", "0")
IS_FAULTY = os.environ.get("FAULT_RANK") == RANK
LONG = 60.0  # seconds


def fail() -> None:
    """The fault."""
    time.sleep(float(os.environ.get("FAULT_DELAY", "0")))
    (DIRECTORY / "moment").write_text(str(time.time()), encoding="utf-8")
    match os.environ["FAULT_KIND"]:
        case "raise":
            raise ValueError("the fault of this test")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "node":
            kill_node()
        case "exit":
            sys.exit(3)
        case "memory":
            raise torch.OutOfMemoryError("CUDA out of memory (the fault of this test)")
        case "hang":
            time.sleep(10 * LONG)


def kill_node() -> None:
    """The launcher first: it would tell of the ranks."""
    size = int(os.environ["LOCAL_WORLD_SIZE"])
    first = int(RANK) // size * size
    siblings = [int((DIRECTORY / f"process-{rank}").read_text().split()[0]) for rank in range(first, first + size)]
    for process in (os.getppid(), *(found for found in siblings if found != os.getpid()), os.getpid()):
        os.kill(process, signal.SIGKILL)


def at_call(call: int, function: Callable, happens: Callable[[], None]) -> Callable:
    """The function, with something happening before its `call`-th call."""
    calls = iter(range(1, 1_000_000))

    def wrapped(*arguments, **options):
        if next(calls) == call:
            happens()
        return function(*arguments, **options)

    return wrapped


def build_in(step: str, happens: Callable[[], None]) -> None:
    """Let something happen where the step does its work."""
    from hf_ptq import driver, sourcing, steps

    forward = driver._calibrated_forward
    places: dict[str, tuple[object, str, int]] = {
        "resolve": (sourcing, "open_source", 1),
        "load": (driver, "refuse_nonfinite", 2),
        "preview": (steps.preview, "preview", 1),
        "pack": (driver, "quantize_unit", 2),
        "write": (steps.ShardWriter, "finish", 1),
        "index": (steps, "write_json", 1),
        "verify": (steps, "verify_export", 1),
    }
    if step == "calibrate":
        driver._calibrated_forward = lambda *a: at_call(2, forward(*a), happens)
    else:
        owner, name, call = places[step]
        setattr(owner, name, at_call(call, getattr(owner, name), happens))


def main() -> int:
    """The command."""
    torch.set_num_threads(1)
    (DIRECTORY / f"process-{RANK}").write_text(f"{os.getpid()} {os.getppid()}", encoding="utf-8")
    if IS_FAULTY:
        time.sleep(float(os.environ.get("FAULT_LATE_SECONDS", "0")))
    if os.environ.get("FAULT_STEP"):
        from hf_ptq import steps

        steps.PREVIEW_TOKENS = 4
        if IS_FAULTY:
            build_in(os.environ["FAULT_STEP"], fail)
        elif os.environ.get("FAULT_PEERS") == "compute":
            build_in("calibrate", lambda: time.sleep(LONG))
    from hf_ptq import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
