"""Everything that can be refused at once, refused at once.

Before torch is imported (a second, and three more for a model class) the request is held against the options' own
rules, the recipe files, the source's directory, the data files, the export path and the machine's CUDA devices. Each
owner of a subject knows what is wrong with it; this file only asks them all, so that the user gets one message with
every problem instead of one problem a run.

CUDA devices are counted through NVML, under CUDA_VISIBLE_DEVICES as the CUDA driver reads it: indices or (unique
beginnings of) UUIDs, up to the first entry that is none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import pynvml

from hf_ptq.checkpoint.source import check_source_cheaply
from hf_ptq.config import DEVICE_PATTERN, RunConfig
from hf_ptq.data.datasets import check_datasets_cheaply, choose_datasets
from hf_ptq.distributed.launch import launch_problems, option_problems, read_launch
from hf_ptq.errors import Problem, UserError, refuse_if_any
from hf_ptq.export.destination import check_export_path
from hf_ptq.quantization.recipe import load_kv, load_recipe


def preflight(config: RunConfig, already: Sequence[Problem] = ()) -> None:
    """Raise one `UserError` with all that is wrong with this request, as far as it shows without torch or a network.

    `already`: problems found while the options were read; they are reported with the others.
    """
    refuse_if_any(dict.fromkeys((*already, *_problems(config))))


def _problems(config: RunConfig) -> Iterator[Problem]:
    launch = read_launch()
    yield from launch_problems()
    yield from option_problems(config, launch)
    yield from config.problems()
    yield from _refusals_of(lambda: load_recipe(config.recipe or config.qformat).with_kv(config.kv_cache_qformat))
    if config.kv_cache_qformat is not None:
        kv_name = config.kv_cache_qformat
        yield from _refusals_of(lambda: load_kv(kv_name))
    yield from missing_device(config.device)
    if launch.rank == 0:  # which resolves the source, reads the data and makes the export for all
        yield from _about_files(config)


def _about_files(config: RunConfig) -> Iterator[Problem]:
    if config.model:
        yield from check_source_cheaply(config.model)
    yield from check_datasets_cheaply(*choose_datasets(config.model, config.datasets, config.calib_sizes))
    yield from check_export_path(config.export_path, _local_source(config.model), config.overwrite)
    yield from _about_html(config)


def _about_html(config: RunConfig) -> Iterator[Problem]:
    """The page is written last, when everything else is done: its path has to be good."""
    if config.report_html is None:
        return
    path, export = config.report_html.expanduser().resolve(), config.export_path.expanduser().resolve()
    if path.is_dir():
        yield Problem(f"--report_html {path} is a directory", "name a file")
    elif path.is_relative_to(export):
        yield Problem(f"--report_html {path} lies in the export", "put it elsewhere: an export holds what servers read")


def _refusals_of(step: Callable[[], object]) -> tuple[Problem, ...]:
    """What a step that raises `UserError` has against the request."""
    try:
        step()
    except UserError as error:
        return error.problems
    return ()


def _local_source(model: str) -> Path | None:
    """The directory or file that the export must stay clear of; None for a hub id and for the demo."""
    path = Path(model).expanduser()
    return path if model and model != "demo" and path.exists() else None


def missing_device(device: str) -> list[Problem]:
    """Why the device of `--device` is not there; empty if it is, or if the name asks for no certain device."""
    if not DEVICE_PATTERN.fullmatch(device) or not device.startswith("cuda"):
        return []
    if metadata.version("torch").endswith("+cpu"):
        what = f"--device {device}: the installed torch {metadata.version('torch')} is built without CUDA"
        return [Problem(what, "install a CUDA build of torch, or use --device cpu")]
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [Problem(f"--device {device}: no NVIDIA driver answers (NVML says {error})", "use --device cpu or auto")]
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        uuids = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    except pynvml.NVMLError as error:
        return [Problem(f"--device {device}: NVML cannot list the GPUs: {error}", "use --device auto")]
    finally:
        pynvml.nvmlShutdown()
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = count_visible(variable, uuids)
    index = int(device.partition(":")[2] or 0)
    if index < count:
        return []
    where = f"{len(uuids)} in the machine" + ("" if variable is None else f", CUDA_VISIBLE_DEVICES={variable!r}")
    there = f"use cuda:0 to cuda:{count - 1}" if count > 1 else "use cuda:0" if count else "use --device cpu"
    return [Problem(f"--device {device} is not there: this process sees {count} CUDA devices ({where})", there)]


def count_visible(variable: str | None, uuids: Sequence[str]) -> int:
    """How many CUDA devices a process sees.

    `variable`: CUDA_VISIBLE_DEVICES or None; `uuids`: of all GPUs. A MIG instance is taken as given. An entry that
    names no device ends the list, and one device named twice empties it, as the CUDA driver has it.
    """
    if variable is None:
        return len(uuids)
    seen: list[str] = []
    for entry in (part.strip() for part in variable.split(",")):
        found = _device_named(entry, uuids)
        if found is None:
            break
        if found in seen:
            return 0
        seen.append(found)
    return len(seen)


def _device_named(entry: str, uuids: Sequence[str]) -> str | None:
    """The UUID that an entry means. Indices follow CUDA's order, which may differ from NVML's: only good to count."""
    if entry.startswith("MIG-"):
        return entry
    if entry.isdigit():
        return uuids[int(entry)] if int(entry) < len(uuids) else None
    matching = [uuid for uuid in uuids if entry and uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None
