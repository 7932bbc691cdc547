"""Every preset on every tiny model passes the independent checker, and means what its name says."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny import CONFIGS, altered, load_tensors

from hf_ptq.quantization.recipe import list_presets
from hf_ptq.report import Report

PRESETS = [name for name, _ in list_presets()]
# What a quantized linear consists of: tensor -> dtype. Input scales where activations are static.
CODES = {
    "fp8": {"weight": torch.float8_e4m3fn, "weight_scale": torch.float32, "input_scale": torch.float32},
    "fp8_per_channel_per_token": {"weight": torch.float8_e4m3fn, "weight_scale": torch.float32},
    "int8_weight_only": {"weight": torch.int8, "weight_scale": torch.float32},
    "w4a16_nvfp4": {
        "weight": torch.uint8, "weight_scale": torch.float8_e4m3fn, "weight_scale_2": torch.float32,
    },
    "nvfp4": {
        "weight": torch.uint8, "weight_scale": torch.float8_e4m3fn, "weight_scale_2": torch.float32,
        "input_scale": torch.float32,
    },
}  # fmt: skip
CODES |= dict.fromkeys(("nvfp4_mlp_only", "nvfp4_experts_only"), CODES["nvfp4"])
EXPERTS_ONLY = ("nvfp4_experts_only",)  # refused for models without experts
DENSE_MODELS = ("llama", "llama_tied", "llama_wide", "qwen3")
CASES = [(p, m) for p in PRESETS for m in CONFIGS if not (p in EXPERTS_ONLY and m in DENSE_MODELS)]
PER_TOKEN = "FP8_PER_CHANNEL_PER_TOKEN"
NEVER = ("embed_tokens", "lm_head", "gate")  # `gate` is a router; a gated projection is a gate_proj


def is_quantized(module: str, preset: str) -> bool:
    """Whether the preset means this linear of a tiny model."""
    if module.rpartition(".")[2] in NEVER:
        return False
    meant = {"nvfp4_mlp_only": ".self_attn." not in module, "nvfp4_experts_only": ".experts." in module}
    return meant.get(preset, True)


def parts_of(export: Path) -> dict[str, dict[str, torch.dtype]]:
    """Quantized module -> its tensors and their dtypes."""
    tensors = load_tensors(export)
    modules = [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]
    return {
        module: {
            name.removeprefix(f"{module}."): t.dtype for name, t in tensors.items() if name.startswith(f"{module}.")
        }
        for module in modules
    }


@pytest.mark.parametrize(("preset", "model"), CASES)
def test_preset(
    preset: str, model: str, tiny: Callable, quantize: Callable[..., Path], check_export: Callable[[Path, Path], None]
) -> None:
    export = quantize(tiny(model), preset)
    check_export(tiny(model), export)
    parts = parts_of(export)
    assert all(found == CODES[preset] for found in parts.values()), parts
    matrices = [name for name, tensor in load_tensors(tiny(model)).items() if tensor.dim() == 2]
    assert set(parts) == {m for m in (name.removesuffix(".weight") for name in matrices) if is_quantized(m, preset)}


def test_the_checker_as_users_run_it(
    tiny: Callable, quantize: Callable[..., Path], run_checker: Callable[[Path, Path], subprocess.CompletedProcess[str]]
) -> None:
    export = quantize(tiny("llama_wide"), "nvfp4")
    done = run_checker(tiny("llama_wide"), export)
    assert done.returncode == 0, done.stdout + done.stderr
    with safe_open(export / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_checker_sees_a_wrong_export(
    tiny: Callable, quantize: Callable[..., Path], check_export: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    """A check that finds nothing wrong anywhere proves nothing."""
    source = tiny("llama_wide")
    export = altered(quantize(source, "nvfp4"), tmp_path / "wrong", lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(AssertionError, match=r"model\.norm\.weight"):
        check_export(source, export)


@pytest.mark.parametrize(
    ("preset", "model", "says"),
    [
        ("int8_weight_only", "llama", "W8A16 is taken by TensorRT-LLM, not by vLLM or SGLang"),
        ("fp8_per_channel_per_token", "llama", f"{PER_TOKEN} is taken by vLLM and TensorRT-LLM, not by SGLang"),
        ("fp8_per_channel_per_token", "mixtral", f"vLLM loads experts of {PER_TOKEN} as static per-tensor FP8"),
    ],
)
def test_a_format_that_a_server_refuses_is_named(
    preset: str, model: str, says: str, tiny: Callable, quantize: Callable[..., Path]
) -> None:
    report = Report(verbose=False)
    quantize(tiny(model), preset, report=report)
    assert says in report.warnings


@pytest.mark.parametrize("preset", ["fp8", "nvfp4"])
def test_formats_that_all_servers_take_give_no_warning(
    preset: str, tiny: Callable, quantize: Callable[..., Path]
) -> None:
    report = Report(verbose=False)
    quantize(tiny("llama"), preset, report=report)
    assert report.warnings == []
