"""Agreement: work that some ranks do ends with all ranks knowing the outcome.

`together(state, step, work)` runs `work` where it belongs and gives its result, or the same error, to every rank.
With one process there is nobody to tell; the error names the step all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hf_ptq.distributed.process_group import DistributedState

Result = TypeVar("Result")


def together(state: DistributedState, step: str, work: Callable[[], Result]) -> Result:
    """The result of `work`. An error that leaves it carries a note that names the step."""
    try:
        return work()
    except Exception as error:
        error.add_note(f"in step: {step} (rank {state.rank} of {state.world_size})")
        raise
