"""Whole runs on a GPU: the decode stays inside our experts, and the export equals the CPU's but for input scales."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_ptq import driver, preview
from hf_ptq.config import RunConfig
from hf_ptq.model.experts import takes_registry
from hf_ptq.report import Report
from hf_ptq.run import run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def export(source: Path, directory: Path, device: str, qformat: str, previews: bool) -> dict[str, torch.Tensor]:
    rows = directory.parent / "rows.safetensors"
    ids = torch.randint(3, 250, (6, 48), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": ids}, rows)
    run(
        RunConfig(
            model=str(source),
            export_path=directory,
            qformat=qformat,
            kv_cache_qformat="fp8",
            datasets=(str(rows),),
            device=device,
            skip_generate=not previews,
            durable=False,
            verbose=False,
        ),
        Report(verbose=False),
    )
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize(
    "qformat", ["nvfp4", "fp8", "int8_weight_only", "fp8_per_channel_per_token", "int8", "mxfp6", "mxfp8"]
)
@pytest.mark.parametrize("name", ["llama_tied", "qwen3_moe", "deepseek_v3"])
def test_exports_equal_the_cpus(name: str, qformat: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Weights and weight scales byte for byte; scales of activations as near as kernels of two kinds are."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    cpu = export(tiny(name), tmp_path / "a" / "out", "cpu", qformat, previews=False)
    gpu = export(tiny(name), tmp_path / "b" / "out", "cuda", qformat, previews=True)
    assert cpu.keys() == gpu.keys()
    for key, tensor in cpu.items():
        if key.endswith(("input_scale", "k_scale", "v_scale")):
            assert abs(float(gpu[key] / tensor) - 1) <= 2**-5, key  # two kinds of kernels
        else:
            assert torch.equal(gpu[key].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), key


def test_the_preview_decodes_through_our_experts(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After quantization too: never batched_mm, to which `generate` moves a model that runs grouped_mm."""
    seen: list[str] = []
    make = preview.preview

    def spied(model, *arguments, **options):
        handles = [
            module.register_forward_hook(lambda m, *_: seen.append(m.config._experts_implementation))
            for module in model.modules()
            if takes_registry(module)
        ]
        text = make(model, *arguments, **options)
        for handle in handles:
            handle.remove()
        return text

    monkeypatch.setattr(preview, "preview", spied)
    export(tiny("qwen3_moe"), tmp_path / "out", "cuda", "nvfp4", previews=True)
    assert len(seen) > 2 * 60 * 3  # two previews of 64 tokens through 3 layers
    assert set(seen) == {"hf_ptq_grouped_mm"}


def test_running_out_of_memory_halves_the_batch(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that does not fit on the card is repeated in halves; the export is the same."""
    whole = export(tiny("qwen3_moe"), tmp_path / "whole", "cuda", "fp8", previews=False)
    loop = driver.run_calibration

    def cramped(forward, *arguments, **options):
        def forward_or_fail(batch):
            forward(batch)
            if batch["input_ids"].shape[0] > 2:
                torch.empty(1 << 45, device="cuda")  # 32 TiB

        return loop(forward_or_fail, *arguments, **options)

    monkeypatch.setattr(driver, "run_calibration", cramped)
    halved = export(tiny("qwen3_moe"), tmp_path / "halved", "cuda", "fp8", previews=False)
    differing = [key for key in whole if not torch.equal(whole[key].float(), halved[key].float())]
    assert all(key.endswith(("input_scale", "k_scale", "v_scale")) for key in differing)
    assert all(abs(float(halved[key] / whole[key]) - 1) <= 2**-7 for key in differing)
