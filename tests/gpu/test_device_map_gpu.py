"""Weights in host memory, in a folder and on a second GPU: the export is that of one GPU, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from tiny import load_tensors, raw

from hf_ptq.config import RunConfig
from hf_ptq.report import Report
from hf_ptq.run import run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
Tiny = Callable[[str], Path]


def exported(source: Path, directory: Path, **options) -> tuple[dict[str, tuple], Report]:
    rows = directory.parent / "rows.safetensors"
    ids = torch.randint(3, 250, (6, 48), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": ids}, rows)
    defaults = {"device": "cuda:0", "kv_cache_qformat": "fp8", "durable": False, "verbose": False}
    report = Report(Console(quiet=True), verbose=False)
    config = RunConfig(str(source), directory, datasets=(str(rows),), **{**defaults, **options})
    run(config, report)
    return {name: raw(tensor) for name, tensor in load_tensors(directory).items()}, report


def assert_same(source: Path, tmp_path: Path, homes: set[str], qformat: str, **spread) -> None:
    """Export whole and spread; all tensors and both texts are the same, and no GPU memory is left over."""
    plain, plain_report = exported(source, tmp_path / "plain", qformat=qformat)
    mapped, mapped_report = exported(source, tmp_path / "mapped", qformat=qformat, **spread)
    plan = mapped_report.sections["plan"]
    assert plan["kind"] == "device map"
    assert set(plan["device_map"].values()) == homes
    assert plain.keys() == mapped.keys()
    assert [name for name in plain if plain[name] != mapped[name]] == []
    assert mapped_report.sections["previews"] == plain_report.sections["previews"]
    assert mapped_report.sections["previews"]["before"] != mapped_report.sections["previews"]["after"]
    assert mapped_report.warnings == plain_report.warnings
    gpus = {home for home in homes if home.startswith("cuda")}
    watched = {stage["name"]: set(stage["gpu_peak_bytes"]) for stage in mapped_report.stages}
    assert watched["load"] == watched["calibrate"] == gpus, watched


@pytest.mark.parametrize(
    ("name", "qformat", "gpu", "host"),
    [
        ("llama_tied", "nvfp4", 0.00014, 0.00014),
        ("qwen3_moe", "fp8", 0.00033, 0.00026),
        ("qwen3_moe", "nvfp4", 0.00033, 0.00026),
    ],
)
def test_host_memory_and_a_folder_beside_one_gpu(
    name: str, qformat: str, gpu: float, host: float, tiny: Tiny, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    spread = {"max_gpu_memory_gb": gpu, "max_cpu_memory_gb": host, "offload_folder": folder}
    assert_same(tiny(name), tmp_path, {"cuda:0", "cpu", "disk"}, qformat, **spread)
    assert not list(folder.iterdir())


def test_host_memory_alone_beside_one_gpu(tiny: Tiny, tmp_path: Path) -> None:
    """Latent attention, and routers in fp32 with a buffer that is used outside of their own forward."""
    spread = {"max_gpu_memory_gb": 0.00035, "max_cpu_memory_gb": 1.0}
    assert_same(tiny("deepseek_v3"), tmp_path, {"cuda:0", "cpu"}, "fp8", **spread)


@two_gpus
@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize(("name", "qformat"), [("llama_tied", "fp8"), ("qwen3_moe", "nvfp4")])
def test_two_gpus(name: str, qformat: str, sequential: bool, tiny: Tiny, tmp_path: Path) -> None:
    """Activations cross from one to the other; statistics and ranges stay on the first."""
    gigabytes = {"llama_tied": 0.00017, "qwen3_moe": 0.00035}[name]
    spread = {"device": "cuda", "max_gpu_memory_gb": gigabytes, "use_seq_device_map": sequential}
    assert_same(tiny(name), tmp_path, {"cuda:0", "cuda:1"}, qformat, **spread)


@two_gpus
def test_a_head_that_is_quantized_on_the_second_gpu(tiny: Tiny, tmp_path: Path) -> None:
    """Its input comes from the first, and the rest of the model is looked at for NaN on both."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("description: all\nrules:\n  - {pattern: '*', weight: fp8, input: fp8}\nalgorithm: max\n")
    options = {"device": "cuda", "recipe": str(recipe), "skip_generate": True}
    plain, _ = exported(tiny("llama"), tmp_path / "plain", **options | {"device": "cuda:0"})
    mapped, _ = exported(tiny("llama"), tmp_path / "mapped", **options, max_gpu_memory_gb=0.00018)
    assert "lm_head.input_scale" in plain
    assert mapped == plain
