"""Whether a disk has room for everything that is going to be written to it.

A run may write in two places, the hub's cache and the export, which often are on one file system: what goes there is
added up, so that the run does not end with a full disk between the download and the export.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hf_ptq.errors import Problem
from hf_ptq.sizes import exact_bytes


@dataclass(frozen=True)
class Need:
    """Bytes that are going to be written below `directory`, which exists. `what` needs them; `cure`: where else."""

    what: str
    directory: Path
    num_bytes: int
    cure: str


def room_problems(needs: Iterable[Need]) -> list[Problem]:
    """One problem for each file system that has less free than it needs; both numbers are in it."""
    of_disk: dict[int, list[Need]] = {}
    for need in needs:
        of_disk.setdefault(need.directory.stat().st_dev, []).append(need)
    return [problem for needs_here in of_disk.values() for problem in _shortage(needs_here)]


def _shortage(needs: list[Need]) -> list[Problem]:
    room = os.statvfs(needs[0].directory)
    free_bytes, needed_bytes = room.f_bavail * room.f_frsize, sum(need.num_bytes for need in needs)
    if free_bytes >= needed_bytes or room.f_blocks == 0:  # some network file systems do not say
        return []
    listed = " and ".join(f"{need.what} needs {exact_bytes(need.num_bytes)}" for need in needs)
    places = " and ".join(dict.fromkeys(str(need.directory) for need in needs))
    what = f"{listed}, the file system of {places} has {exact_bytes(free_bytes)} free"
    missing = f"{exact_bytes(needed_bytes - free_bytes)} are missing"
    return [Problem(f"{what}: {missing}", "free room there, or " + ", or ".join(need.cure for need in needs))]
