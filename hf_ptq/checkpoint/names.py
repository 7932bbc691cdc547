"""Which parameter each source tensor fills, and where in it: the export follows the source through this map.

A model in memory may name and stack its weights otherwise than the checkpoint does. The loader knows the way from
the source to the model; run over the source's names (`rename`, from `model/build.py`), it says for each tensor which
parameter it belongs to. Exporting by source tensor then gives the source's own names without inverting anything:
take the tensor's place in its parameter, quantize it, write it under its own name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

# Source name -> (parameter or buffer of the model or None, the converter pattern that matched or None).
Rename = Callable[[str], tuple[str | None, str | None]]


@dataclass(frozen=True)
class Placement:
    """Where a source tensor goes. `parameter` is None where the model never builds it (MTP, extra layers).

    With a converter, `pattern` is the source pattern that matched and `position` counts the tensors of that pattern
    in the parameter (the expert's number, for stacked experts).
    """

    parameter: str | None
    pattern: str | None = None
    position: int = 0


def place_tensors(names: Iterable[str], rename: Rename) -> dict[str, Placement]:
    """Source tensor -> its placement. `names` are in the loader's order, since it counts positions in that order."""
    placed: dict[str, Placement] = {}
    positions: Counter[tuple[str, str]] = Counter()
    for name in names:
        parameter, pattern = rename(name)
        if parameter is None or pattern is None:
            placed[name] = Placement(parameter)
            continue
        placed[name] = Placement(parameter, pattern, positions[parameter, pattern])
        positions[parameter, pattern] += 1
    return placed


def by_parameter(placements: Mapping[str, Placement]) -> dict[str, list[str]]:
    """Parameter -> the source tensors that fill it, in order."""
    found: dict[str, list[str]] = {}
    for name, placement in placements.items():
        if placement.parameter is not None:
            found.setdefault(placement.parameter, []).append(name)
    return found
