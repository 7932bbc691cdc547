"""What was asked for, as one frozen value.

The command line is text; `RunConfig` is that text parsed once. Nothing downstream assigns to it: what a stage derives
from it gets a name and a type of its own. Rules that need more than one field, or a range, are in `problems()`; what
somebody else knows better (files, recipes, data sets, the machine) is asked in preflight.py. Imports no torch: a
refusal costs milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_ptq.errors import Problem, UserError

DEVICE_PATTERN = re.compile(r"auto|cpu|cuda(:\d+)?")
EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "eager")
# Decimal units as in transformers' max_shard_size; the binary ones are spelled with an i.
SIZE_UNITS: dict[str, int] = {
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


@dataclass(frozen=True)
class RunConfig:
    """One run of hf-ptq. Sizes are in the unit of the name (`_bytes`), rows or tokens."""

    model: str
    """Local directory, hub id, "demo" or a .gguf file."""
    export_path: Path
    """Directory that the quantized checkpoint gets."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    qformat: str = "fp8"
    """Preset; not looked at when `recipe` is given."""
    kv_cache_qformat: str | None = None
    """KV-cache preset; None: what the recipe says, else "fp8_cast"."""
    recipe: str | None = None
    """Recipe file (YAML)."""
    overwrite: bool = False
    max_shard_bytes: int = 5_000_000_000
    durable: bool = True
    """fsync the export before it gets its name."""
    datasets: tuple[str, ...] = ()
    """Calibration data sets; empty: the default ones."""
    calib_sizes: tuple[int, ...] = ()
    """Calibration rows of each data set, or one number for all together; empty: the default number."""
    calib_seq: int = 512
    """Tokens in a calibration row."""
    batch_size: int = 0
    """Rows in a calibration batch; 0: chosen by memory arithmetic."""
    device: str = "auto"
    """auto | cpu | cuda | cuda:N."""
    attn_implementation: str | None = None
    experts_implementation: str = "grouped_mm"
    """Kernel that runs the routed experts: grouped_mm | eager."""
    report_html: Path | None = None
    """A page with the errors of all layers and the experts' load as plots."""
    trust_remote_code: bool = False
    skip_generate: bool = False
    dry_run: bool = False
    verbose: bool = True
    seed: int = 1234

    def problems(self) -> list[Problem]:
        """Every rule of the options that this request breaks; empty for a sound one."""
        return [*self._about_model_and_device(), *self._about_numbers()]

    def _about_model_and_device(self) -> Iterator[Problem]:
        if not self.model:
            yield Problem("--model is missing", "give a local directory, a hub id, a .gguf file, or the word demo")
        elif self.revision is not None and (self.model == "demo" or Path(self.model).expanduser().exists()):
            yield Problem(
                f"--revision {self.revision} names a version on the hub, but --model {self.model} is local",
                "leave --revision out, or give a hub id",
            )
        if self.experts_implementation not in EXPERTS_IMPLEMENTATIONS:
            known = " or ".join(EXPERTS_IMPLEMENTATIONS)
            yield Problem(f"--experts_implementation {self.experts_implementation!r} is not known", f"use {known}")
        if not DEVICE_PATTERN.fullmatch(self.device):
            yield Problem(f"--device {self.device!r} is no device", "use auto, cpu, cuda or cuda:N")

    def _about_numbers(self) -> Iterator[Problem]:
        minima = (
            ("--calib_seq", self.calib_seq, 1, "it is the number of tokens in a row"),
            ("--batch_size", self.batch_size, 0, "it is the number of rows in a batch; 0 lets hf-ptq choose"),
            ("--max_shard_size", self.max_shard_bytes, 1, "it is the size of a file of the export, such as 5GB"),
            ("--seed", self.seed, 0, "give a whole number from 0 on"),
        )
        for flag, value, minimum, cure in minima:
            if value < minimum:
                yield Problem(f"{flag} {value} is less than {minimum}", cure)


def parse_size(text: str) -> int:
    """Bytes of a size such as "5GB", "1.5 GiB" or "500000000". Raises `UserError` naming the text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = SIZE_UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise UserError(Problem(f"{text!r} is no size", "write it as 5GB, 500MB, 2GiB or a number of bytes"))
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def parse_counts(text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas. Raises `UserError` naming each part that is none."""
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not re.fullmatch(r"-?\d+", part)]
    if wrong:
        named = ", ".join(map(repr, wrong))
        raise UserError(Problem(f"{named} in {text!r} is no whole number", "write it as 512 or as 256,128"))
    return tuple(int(part) for part in parts)


def parse_names(text: str) -> tuple[str, ...]:
    """Names separated by commas. Raises `UserError` where one is empty."""
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise UserError(Problem(f"a name in {text!r} is empty", "separate names by single commas"))
    return names
