"""Whole runs with weights in a folder: what comes out is what a plain run writes, bit for bit, and nothing is left.

The CPU computes here; tests/gpu has the same for GPUs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from test_host_memory import write_model
from tiny import load_tensors, raw, save_tiny

from hf_ptq import driver, planning, steps
from hf_ptq.errors import UserError
from hf_ptq.model import device_map
from hf_ptq.model.experts import takes_registry
from hf_ptq.report import Report

Quantize = Callable[..., Path]


def report() -> Report:
    return Report(Console(quiet=True), verbose=False)


def exported(quantize: Quantize, source: Path, name: str, **options) -> tuple[dict[str, tuple], Report]:
    told = report()
    path = quantize(source, name=name, report=told, **options)
    return {key: raw(tensor) for key, tensor in load_tensors(path).items()}, told


@pytest.mark.parametrize(
    ("model", "qformat", "gigabytes"),
    [("llama", "fp8", 0.00016), ("llama_tied", "nvfp4", 0.00012), ("qwen3_moe", "nvfp4", 0.0003)],
)
def test_equals_a_plain_run(
    model: str, qformat: str, gigabytes: float, tiny: Callable, quantize: Quantize, tmp_path: Path
) -> None:
    """Weights, scales and both texts; some layers stay in memory, others do not."""
    options = {"qformat": qformat, "kv_cache_qformat": "fp8", "skip_generate": False}
    plain, plain_report = exported(quantize, tiny(model), "plain", **options)
    spread = {"max_cpu_memory_gb": gigabytes, "offload_folder": tmp_path / "folder"}
    mapped, mapped_report = exported(quantize, tiny(model), "mapped", **options, **spread)
    plan = mapped_report.sections["plan"]
    assert plan["kind"] == "device map"
    assert set(plan["device_map"].values()) == {"cpu", "disk"}
    assert plain_report.sections["plan"]["kind"] == "single"
    assert plain.keys() == mapped.keys()
    assert [name for name in plain if plain[name] != mapped[name]] == []
    told = ("previews", "signal_to_noise", "experts", "data", "batch_size")
    for section in told:
        assert mapped_report.sections.get(section) == plain_report.sections.get(section), section
    previews = mapped_report.sections["previews"]
    assert previews["before"] != previews["after"], "the second text comes from the rounded weights in the folder"
    assert mapped_report.warnings == plain_report.warnings
    assert not list((tmp_path / "folder").iterdir())


@pytest.mark.parametrize(("model", "gigabytes"), [("deepseek_v3", 0.00018), ("llama_tied", 0.00008)])
def test_everything_but_one_unit_on_the_disk(
    model: str, gigabytes: float, quantize: Quantize, check_export: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    """Latent attention and a dense first layer; an embedding that is the head too. Nothing stays in memory."""
    source = save_tiny(model, tmp_path / "source", num_hidden_layers=2)
    options = {"qformat": "fp8", "kv_cache_qformat": "fp8", "skip_generate": False}
    plain, plain_report = exported(quantize, source, "plain", **options)
    spread = {"max_cpu_memory_gb": gigabytes, "offload_folder": tmp_path / "folder"}
    mapped, mapped_report = exported(quantize, source, "mapped", **options, **spread)
    assert set(mapped_report.sections["plan"]["device_map"].values()) == {"disk"}
    assert mapped == plain
    assert mapped_report.sections["previews"] == plain_report.sections["previews"]
    check_export(source, tmp_path / "mapped")


class InventedGpu(str):
    """For torch it is the CPU, and yet not equal to "cpu": weights on it compute there, those on "cpu" do not."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("model", "qformat", "room"),
    [("llama_tied", "nvfp4", (140_000, 140_000)), ("qwen3_moe", "fp8", (330_000, 260_000))],
)
def test_weights_in_host_memory_beside_a_device(
    model: str,
    qformat: str,
    room: tuple[int, int],
    tiny: Callable,
    quantize: Quantize,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some layers live on an invented GPU, some in host memory and some in the folder."""
    gpu = InventedGpu("cpu")
    options = {"qformat": qformat, "kv_cache_qformat": "fp8", "skip_generate": False}
    plain, plain_report = exported(quantize, tiny(model), "plain", **options)
    rooms = {gpu: room[0], "cpu": room[1], "disk": 10**9}
    names: dict[str, int | str] = {gpu: 0, "cpu": "cpu"}
    gather = planning.gather_facts
    monkeypatch.setattr(planning, "gather_facts", lambda *of: dataclasses.replace(gather(*of), device=gpu))
    monkeypatch.setattr(planning, "measure_rooms", lambda *_: rooms)
    monkeypatch.setattr(device_map, "_accelerates_name", names.__getitem__)
    monkeypatch.setattr(device_map, "_our_name", lambda found: gpu if found == 0 else found)
    options |= {"offload_folder": tmp_path / "folder"}
    mapped, mapped_report = exported(quantize, tiny(model), "mapped", **options)
    homes = list(mapped_report.sections["plan"]["device_map"].values())
    assert [any(home is gpu for home in homes), "cpu" in homes, "disk" in homes] == [True, True, True]
    assert mapped == plain
    assert mapped_report.sections["previews"] == plain_report.sections["previews"]
    assert mapped_report.warnings == plain_report.warnings


def test_the_model_has_no_hooks_and_the_folder_no_file_in_the_end(
    tiny: Callable, quantize: Quantize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the experts run, they are ours and their weights are real; afterwards all is given back."""
    jobs: list[driver.Job] = []
    seen: list[tuple[str, bool]] = []
    load = driver.load

    def watched(job: driver.Job, *arguments) -> None:
        load(job, *arguments)
        jobs.append(job)
        for module in job.model.modules():
            if takes_registry(module):
                module.register_forward_hook(
                    lambda m, *_: seen.append((m.config._experts_implementation, m.down_proj.is_meta))
                )

    monkeypatch.setattr(driver, "load", watched)
    folder = tmp_path / "folder"
    quantize(tiny("qwen3_moe"), "nvfp4", max_cpu_memory_gb=0.0003, offload_folder=folder, skip_generate=False)
    assert len(seen) > 2 * 60 * 3
    assert set(seen) == {("hf_ptq_grouped_mm", False)}
    (job,) = jobs
    assert not [m for m in job.model.modules() if "_hf_hook" in vars(m)]
    assert len(job.offloaded) == 0
    assert files_in(folder) == []


@pytest.mark.parametrize("step", ["load", "quantize", "preview_after"])
def test_a_failure_leaves_nothing(
    step: str, tiny: Callable, quantize: Quantize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = steps if step == "preview_after" else driver
    work = getattr(owner, step)

    def failing(*arguments) -> None:
        if step == "load":
            work(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, step, failing)
    with pytest.raises(KeyboardInterrupt):
        quantize(tiny("llama"), "fp8", max_cpu_memory_gb=0.00016, offload_folder=tmp_path / "folder")
    assert not list((tmp_path / "folder").iterdir())
    assert not list(tmp_path.glob("*llama*"))


def files_in(folder: Path) -> list[str]:
    """Of the files that this process has open, named or not."""
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [link for link in links if link.startswith(str(folder))]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_cpu_memory_gb": 0.00016}, r"have no place\n.*--offload_folder DIRECTORY"),
        (
            {"max_cpu_memory_gb": 0.00001, "offload_folder": "folder"},
            r"largest unit alone needs .*\n.*a larger --max_cpu",
        ),
    ],
)
def test_refusals(options: dict, says: str, tiny: Callable, quantize: Quantize, tmp_path: Path) -> None:
    if "offload_folder" in options:
        options = options | {"offload_folder": tmp_path / "folder"}
    with pytest.raises(UserError, match=says):
        quantize(tiny("llama"), "fp8", **options)
    assert not list(tmp_path.iterdir())


def test_a_model_beyond_the_memory_is_refused_with_its_cure(
    tiny: Callable, quantize: Quantize, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any option: whole is tried, then spread over what there is, and both are told."""
    free = 200_000
    monkeypatch.setattr("hf_ptq.model.sharding.free_bytes", lambda _: free)
    monkeypatch.setattr("hf_ptq.model.device_map.free_bytes", lambda _: free)
    with pytest.raises(UserError) as raised:
        quantize(tiny("llama"), "fp8")
    single, spread = map(str, raised.value.problems)
    assert "does not fit: single" in single
    assert "does not fit: device map: weights on cpu" in spread
    assert "--offload_folder" in spread
    assert "--max_cpu_memory_gb" not in spread


def test_a_dry_run_says_the_map_and_makes_no_folder(tiny: Callable, quantize: Quantize, tmp_path: Path) -> None:
    told = report()
    options = {"max_cpu_memory_gb": 0.00016, "offload_folder": tmp_path / "folder", "dry_run": True}
    quantize(tiny("llama"), "fp8", report=told, **options)
    assert told.sections["plan"]["kind"] == "device map"
    assert not list(tmp_path.iterdir())


def test_host_memory_is_the_share_and_one_unit(tmp_path: Path) -> None:
    """By the command line. The C library's reserve of freed blocks is no matter of the promise: it is switched off."""
    source, out, folder = tmp_path / "source", tmp_path / "out", tmp_path / "folder"
    model_bytes = write_model(source, 150)
    command = [
        sys.executable, "-m", "hf_ptq", "--model", str(source), "--qformat", "fp8", "--export_path", str(out),
        "--dataset", "pydoc", "--calib_size", "1", "--calib_seq", "64", "--device", "cpu", "--no-durable",
        "--skip_generate", "--max_cpu_memory_gb", "0.07", "--offload-folder", str(folder),
    ]  # fmt: skip
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on the meta device" not in done.stderr
    told = json.loads((out / "hf_ptq_report.json").read_text())
    peaks = {stage["name"]: stage["host_peak_bytes"] for stage in told["stages"]}
    expected = told["plan"]["expected_bytes"]
    print({name: f"{peak / 1e6:.0f}" for name, peak in peaks.items()}, f"of {expected / 1e6:.0f} MB")
    assert expected < model_bytes / 2
    assert peaks["load"] < expected + 30e6
    assert peaks["calibrate"] < expected + 60e6
    assert max(peaks.values()) < expected + 130e6, peaks  # as test_host_memory.py has it
    assert not list(folder.iterdir())
    assert torch.equal(*(load_tensors(path)["model.norm.weight"] for path in (source, out)))
