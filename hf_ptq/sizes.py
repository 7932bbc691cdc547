"""Sizes as text, in both directions.

What is shown is decimal, of files and of memory alike: a GB is 10^9 bytes, as disks, Hugging Face's `max_shard_size`
and the options that end in `_gb` count. Torch's own messages count in GiB.
"""

from __future__ import annotations

import re

from hf_ptq.errors import Problem, UserError

SIZE_UNITS: dict[str, int] = {  # as users may write them: the binary ones are spelled with an i
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_size(text: str) -> int:
    """Bytes of a size such as "5GB", "1.5 GiB" or "500000000". Raises `UserError` naming the text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = SIZE_UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise UserError(Problem(f"{text!r} is no size", "write it as 5GB, 500MB, 2GiB or a number of bytes"))
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def human_bytes(count: float) -> str:
    """A size for people, in the unit that fits, three digits: "1.23 GB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PB"


def exact_bytes(num_bytes: int) -> str:
    """The same and to the byte, where a limit was missed: "1.23 GB (1,234,567,890 bytes)"."""
    return f"{human_bytes(num_bytes)} ({num_bytes:,} bytes)"


def gigabytes(num_bytes: int) -> str:
    """Always GB, two decimals, for sums that are to be followed: "1.23 GB"."""
    return f"{num_bytes / 1e9:.2f} GB"
