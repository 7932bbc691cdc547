"""Every preset on tiny models: it passes the independent checker, or ours in float64 where that does not know the
format, and means what its name says; or it is refused, saying why."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from decoding import judge, parts_of
from safetensors import safe_open
from tiny import CONFIGS, altered, load_tensors

from hf_ptq.errors import UserError
from hf_ptq.quantization.formats.description import FORMATS
from hf_ptq.quantization.recipe import NOT_BUILT_YET, list_kv_presets, list_presets, load_recipe
from hf_ptq.report import Report

PRESETS = [name for name, _ in list_presets()]
ELEMENTS = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}  # the others are packed into bytes
SCALES = {"fp32": torch.float32, "e4m3": torch.float8_e4m3fn, "e8m0": torch.uint8}
# Layers of a kind that these presets mean, by a word in the module's name; the others mean all linears.
MEANT = {
    "nvfp4_mlp_only": (".mlp.", ".block_sparse_moe."), "nvfp4_experts_only": (".experts.",),
    "nvfp4_mlp_weight_only": (".mlp.", ".block_sparse_moe."), "mxfp4_mlp_weight_only": (".mlp.", ".block_sparse_moe."),
    "nvfp4_omlp_only": (".mlp.", ".block_sparse_moe.", ".o_proj"),
}  # fmt: skip
MAMBA = ("q_proj", "k_proj", "v_proj", "o_proj")  # what presets of state-space models with experts leave alone
EXPERTS_ONLY = ("nvfp4_experts_only",)  # refused for models without experts
NEVER = ("embed_tokens", "lm_head", "gate")  # `gate` is a router; a gated projection is a gate_proj
DENSE_MODELS = ("llama", "llama_tied", "llama_wide", "qwen3")
# Every preset on three models, of which the sizes of the last do not fit every format; some on all.
WIDE, NARROW = ("llama_wide", "qwen3_moe_wide"), "deepseek_v3"
ON_ALL = ("fp8", "nvfp4", "nvfp4_experts_only", "int8_weight_only", "mxfp8")
CASES = [(p, m) for p in PRESETS for m in (*WIDE, NARROW) if not (p in EXPERTS_ONLY and m in DENSE_MODELS)]
CASES += [
    (p, m) for p in ON_ALL for m in CONFIGS if (p, m) not in CASES and not (p in EXPERTS_ONLY and m in DENSE_MODELS)
]
PER_TOKEN = "FP8_PER_CHANNEL_PER_TOKEN"


def formats_of(preset: str) -> tuple[str, str | None]:
    """The preset's formats of weights and inputs: it has one pair."""
    (pair,) = {(rule.weight, rule.input) for rule in load_recipe(preset).rules if rule.weight}
    return str(pair[0]), pair[1]


def tensors_of(preset: str) -> dict[str, torch.dtype]:
    """What a quantized linear consists of: tensor -> dtype. Input scales where activations are static."""
    weight, inputs = formats_of(preset)
    fmt = FORMATS[weight]
    found = {"weight": ELEMENTS.get(fmt.element, torch.uint8), "weight_scale": SCALES[fmt.scale]}
    found |= {"weight_scale_2": torch.float32} if fmt.has_global_scale else {}
    return found | ({"input_scale": torch.float32} if inputs and FORMATS[inputs].needs_data else {})


def is_quantized(module: str, preset: str) -> bool:
    """Whether the preset means this linear of a tiny model."""
    leaf = module.rpartition(".")[2]
    if leaf in NEVER or (preset.startswith("mamba_moe") and leaf in MAMBA):
        return False
    return any(word in module for word in MEANT.get(preset, ("",)))


@pytest.mark.parametrize(("preset", "model"), CASES)
def test_preset(
    preset: str, model: str, tiny: Callable, quantize: Callable[..., Path], check_export: Callable[..., None]
) -> None:
    source, report = tiny(model), Report(verbose=False)
    sizes = {name: tensor.shape for name, tensor in load_tensors(source).items() if tensor.dim() == 2}
    meant = [m for m in (name.removesuffix(".weight") for name in sizes) if is_quantized(m, preset)]
    weight = FORMATS[formats_of(preset)[0]]
    unfit = [m for m in meant if sizes[f"{m}.weight"][1] % weight.input_multiple]
    if unfit and weight.input_multiple > 32:  # then members of fused groups are among them
        with pytest.raises(UserError, match=r"servers fuse these|quantizes nothing"):
            quantize(source, preset)
        return
    export = quantize(source, preset, report=report)
    meant = [m for m in meant if m not in unfit]
    told = [w for w in report.warnings if "left unquantized" in w]
    assert all(any(f".{m.rpartition('.')[2]}" in w for w in told) for m in unfit)
    parts = parts_of(export)
    assert set(parts) == set(meant)
    dtypes = tensors_of(preset)
    assert all({name: t.dtype for name, t in found.items()} == dtypes for found in parts.values())
    judge(source, export, weight.name, check_export)


def test_all_names_of_the_peer_are_known() -> None:
    assert len(PRESETS) + len(NOT_BUILT_YET) == 34
    assert {name for name, _ in list_kv_presets()} == {
        "none", "fp8", "fp8_cast", "fp8_affine", "nvfp4", "nvfp4_cast", "nvfp4_affine", "nvfp4_rotate",
    }  # fmt: skip


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
        ("int4_blockwise_weight_only", "llama_wide", "no server takes W4A16"),
        ("mxfp6", "llama_wide", "no server takes MXFP6"),
        ("nvfp4_mlp_weight_only", "llama_wide", "no server takes W4A16_NVFP4 in groups of 32"),
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
