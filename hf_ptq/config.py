"""What was asked for, as one frozen value.

The command line is text; `RunConfig` is that text parsed once. Nothing downstream assigns to it: what a stage derives
from it gets a name and a type of its own. Rules that need more than one field, or a range, are in `problems()`; what
somebody else knows better (files, recipes, data sets, the machine) is asked in preflight.py. Imports no torch: a
refusal costs milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_ptq.errors import Problem, UserError

DEVICE_PATTERN = re.compile(r"auto|cpu|cuda(:\d+)?")
EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "eager")
DENSE_CHOICES = ("replicated", "fsdp")
EXPORT_FORMATS = ("modelopt", "compressed-tensors", "fp8", "fakequant")  # those of export.layouts, known without torch
EXPORT_ALIASES = {"hf": "modelopt", "compressed_tensors": "compressed-tensors"}  # ModelOpt says hf
LONGEST_MINUTES = 7 * 24 * 60


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
    export_fmt: str = "modelopt"
    """Output layout; one of `EXPORT_FORMATS`."""
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
    experts_implementation: str | None = None
    """Kernel that runs the routed experts: grouped_mm | eager; None: grouped_mm."""
    ep_degree: int | None = None
    """Ranks that hold one copy of the routed experts together; None: chosen by the plan."""
    dense: str | None = None
    """What becomes of the rest in an expert-parallel run: replicated | fsdp; None: chosen by the plan."""
    use_fsdp2: bool = False
    """Shard every weight over the ranks."""
    timeout_minutes: float = 30.0
    """How long a rank waits for the others."""
    use_seq_device_map: bool = False
    """Fill one device after the other, where one process spreads a model over several."""
    gpu_max_mem_percentage: float | None = None
    """Share of each GPU's free memory that weights may take, 0 to 1; None: 0.8, or all under `max_gpu_memory_gb`."""
    max_gpu_memory_gb: float | None = None
    """GB (10^9 bytes) of weights on each GPU."""
    max_cpu_memory_gb: float | None = None
    """GB of weights in host memory; None: none beside a GPU, unless there is a folder too."""
    offload_folder: Path | None = None
    """Directory of the weights that no device has room for."""
    report_html: Path | None = None
    """A page with the errors of all layers and the experts' load as plots."""
    trust_remote_code: bool = False
    skip_generate: bool = False
    dry_run: bool = False
    verbose: bool = True
    seed: int = 1234

    def problems(self) -> list[Problem]:
        """Every rule of the options that this request breaks; empty for a sound one."""
        return [*self._about_model_and_device(), *self._about_numbers(), *self._about_device_maps()]

    def as_dict(self) -> dict[str, Any]:
        """Option -> value, as they count: `qformat` is None where `recipe` is given."""
        return asdict(self) | ({"qformat": None} if self.recipe else {})

    def device_map_options(self) -> list[str]:
        """The options given that spread the model of one process over devices."""
        given = {
            "--use_seq_device_map": self.use_seq_device_map or None,
            "--gpu_max_mem_percentage": self.gpu_max_mem_percentage,
            "--max_gpu_memory_gb": self.max_gpu_memory_gb,
            "--max_cpu_memory_gb": self.max_cpu_memory_gb,
            "--offload_folder": self.offload_folder,
        }
        return [flag for flag, value in given.items() if value is not None]

    def gpu_options(self) -> list[str]:
        """Those of them that are about GPUs."""
        return [flag for flag in self.device_map_options() if flag not in ("--max_cpu_memory_gb", "--offload_folder")]

    def _about_model_and_device(self) -> Iterator[Problem]:
        if not self.model:
            yield Problem("--model is missing", "give a local directory, a hub id, a .gguf file, or the word demo")
        elif self.revision is not None and (self.model == "demo" or Path(self.model).expanduser().exists()):
            yield Problem(
                f"--revision {self.revision} names a version on the hub, but --model {self.model} is local",
                "leave --revision out, or give a hub id",
            )
        if self.experts_implementation not in (None, *EXPERTS_IMPLEMENTATIONS):
            known = " or ".join(EXPERTS_IMPLEMENTATIONS)
            yield Problem(f"--experts_implementation {self.experts_implementation!r} is not known", f"use {known}")
        if self.dense not in (None, *DENSE_CHOICES):
            yield Problem(f"--dense {self.dense!r} is not known", f"use {' or '.join(DENSE_CHOICES)}")
        if self.export_fmt not in EXPORT_FORMATS:
            yield Problem(f"--export_fmt {self.export_fmt!r} is not known", f"use {', '.join(EXPORT_FORMATS)} or hf")
        if not DEVICE_PATTERN.fullmatch(self.device):
            yield Problem(f"--device {self.device!r} is no device", "use auto, cpu, cuda or cuda:N")

    def _about_numbers(self) -> Iterator[Problem]:
        minima = (
            ("--calib_seq", self.calib_seq, 1, "it is the number of tokens in a row"),
            ("--batch_size", self.batch_size, 0, "it is the number of rows in a batch; 0 lets hf-ptq choose"),
            ("--max_shard_size", self.max_shard_bytes, 1, "it is the size of a file of the export, such as 5GB"),
            ("--seed", self.seed, 0, "give a whole number from 0 on"),
            ("--ep_degree", self.ep_degree, 1, "it is the number of ranks that share the experts; 1 shares none"),
        )
        for flag, value, minimum, cure in minima:
            if value is not None and value < minimum:
                yield Problem(f"{flag} {value} is less than {minimum}", cure)
        if not 0 < self.timeout_minutes <= LONGEST_MINUTES:
            what = f"--timeout_minutes {self.timeout_minutes:g} is no time to wait"
            yield Problem(what, f"give minutes above 0, at most {LONGEST_MINUTES} (a week)")

    def _about_device_maps(self) -> Iterator[Problem]:
        share = self.gpu_max_mem_percentage
        if share is not None and not 0 < share <= 1:
            yield Problem(f"--gpu_max_mem_percentage {share:g} is not above 0 and at most 1", "0.8 stands for 80 %")
        sizes = {"--max_gpu_memory_gb": self.max_gpu_memory_gb, "--max_cpu_memory_gb": self.max_cpu_memory_gb}
        for flag, size in sizes.items():
            if size is not None and not 0 < size < float("inf"):
                yield Problem(f"{flag} {size:g} is no size", "give GB (10^9 bytes) above 0")
        if self.offload_folder is not None and self.offload_folder.exists() and not self.offload_folder.is_dir():
            yield Problem(f"--offload_folder {self.offload_folder} is a file", "name a directory; it may be a new one")
        if self.device == "cpu" and self.gpu_options():
            yield Problem(f"--device cpu uses no GPU, {', '.join(self.gpu_options())} can do nothing", "leave one out")
        if self.use_fsdp2 and self.device_map_options():
            given = ", ".join(self.device_map_options())
            yield Problem(f"--use_fsdp2 shards over ranks, {given} spread within one process", "leave one out")


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
