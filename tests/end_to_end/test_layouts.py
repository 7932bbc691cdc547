"""Every layout against somebody else's reader: transformers loads it, and computes what our fake-quantized model does.

Both in fp32. compressed-tensors decompresses some formats into bf16, of which it is kept. It rounds MX activations by
another rule than Model Optimizer (the exponent of the floor), so there only weights are compared; and transformers
holds experts dequantized and does not round their inputs.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_quantized import Captured, Rounds, float32_tiny, logits_of, relative
from tiny import load_tensors
from transformers import AutoModelForCausalLM

from hf_ptq.errors import UserError
from hf_ptq.report import Report

IDS = torch.arange(3, 35)[None]
DENSE = (
    "fp8", "fp8_per_channel_per_token", "fp8_2d_blockwise_weight_only", "int8", "int8_weight_only",
    "int4_blockwise_weight_only", "nvfp4", "nvfp4_four_over_six", "w4a16_nvfp4", "nvfp4_mlp_only", "mxfp4", "mxfp8",
    "mxfp4_mlp_weight_only",
)  # fmt: skip
OF_EXPERTS = ("fp8", "fp8_per_channel_per_token", "int4_blockwise_weight_only", "mxfp4")
CASES = [*(("llama_wide", preset) for preset in DENSE), *(("qwen3_moe_wide", preset) for preset in OF_EXPERTS)]


def is_mx(preset: str) -> bool:
    return preset.startswith("mx")


@pytest.fixture(scope="module")
def float_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny checkpoints in fp32."""
    return functools.cache(lambda name: float32_tiny(name, tmp_path_factory.mktemp("float") / name))


def load(export: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()


@pytest.fixture
def decompressed_to_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """compressed-tensors without its rounding to bf16."""
    nvfp4 = importlib.import_module("compressed_tensors.compressors.nvfp4.base")
    mxfp8 = importlib.import_module("compressed_tensors.compressors.mxfp8.base")
    unpack, exponents = nvfp4.unpack_fp4_from_uint8, mxfp8.decompress_mx_scale
    monkeypatch.setattr(nvfp4, "unpack_fp4_from_uint8", functools.partial(unpack, dtype=torch.float32))
    monkeypatch.setattr(mxfp8, "decompress_mx_scale", lambda scale: exponents(scale).float())


@pytest.mark.usefixtures("decompressed_to_fp32")
@pytest.mark.parametrize(("model", "preset"), CASES)
def test_transformers_computes_what_our_model_does(
    model: str, preset: str, float_tiny: Callable, quantize: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: Rounds = lambda q: q.num_experts is None and not is_mx(preset)  # noqa: E731
    ours = Captured(monkeypatch, logits_of(IDS), rounds)
    options = {"export_fmt": "compressed-tensors", "kv_cache_qformat": "none", "skip_generate": False}
    export = quantize(float_tiny(model), preset, **options)
    loaded = load(export)
    for module in loaded.modules() if is_mx(preset) else ():
        if "quantization_scheme" in vars(module):
            module.quantization_scheme.input_activations = None
    with torch.no_grad():
        found = loaded(IDS).logits
        plain = load(float_tiny(model))(IDS).logits
    assert relative(found, ours.value) < 1e-5
    assert relative(plain, ours.value) > 1e-2, "nothing was quantized"


@pytest.mark.parametrize("preset", ["nvfp4", "int8", "mxfp6"])
def test_fakequant_is_a_plain_checkpoint_with_the_error_in_it(
    preset: str, float_tiny: Callable, quantize: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Captured(monkeypatch, logits_of(IDS), lambda _: False)
    source = float_tiny("qwen3_moe_wide")
    export = quantize(source, preset, export_fmt="fakequant", kv_cache_qformat="fp8", skip_generate=False)
    assert "quantization_config" not in json.loads((export / "config.json").read_text())
    assert not (export / "hf_quant_config.json").exists()
    with torch.no_grad():
        assert torch.equal(load(export)(IDS).logits, ours.value)
    before, after = load_tensors(source), load_tensors(export)
    assert {n: (t.dtype, t.shape) for n, t in before.items()} == {n: (t.dtype, t.shape) for n, t in after.items()}
    state = load_tensors(export / "quantizer_state")
    formats = json.loads((export / "quantizer_state" / "quantizer_state.json").read_text())
    assert formats["kv_cache"]["layers"] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert set(formats["modules"]) == {n.removesuffix(".weight") for n, t in after.items() if not t.equal(before[n])}
    assert state["model.layers.0.self_attn.k_quantizer.amax"] > 0
    module = "model.layers.0.self_attn.o_proj"
    weight = before[f"{module}.weight"].abs()
    expected = {
        "nvfp4": {"weight": weight.amax(), "input": torch.Size([])},
        "int8": {"weight": weight.amax(-1), "input": torch.Size([])},
        "mxfp6": {},
    }[preset]
    found = {name.split(".")[-2].removesuffix("_quantizer"): t for name, t in state.items() if f"{module}." in name}
    assert found.keys() == expected.keys()
    if expected:
        assert torch.equal(found["weight"], expected["weight"])
        assert found["input"].shape == expected["input"]
        assert found["input"] > 0


def test_block_fp8_as_transformers_reads_it(
    float_tiny: Callable, quantize: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Captured(monkeypatch, logits_of(IDS), lambda _: False)
    options = {"export_fmt": "fp8", "kv_cache_qformat": "fp8_cast", "skip_generate": False}
    report = Report(verbose=False)
    export = quantize(float_tiny("qwen3_moe_wide"), "fp8_2d_blockwise_weight_only", report=report, **options)
    with torch.no_grad():
        assert relative(load(export)(IDS).logits, ours.value) < 1e-5
    block = json.loads((export / "config.json").read_text())["quantization_config"]
    routers = [f"model.layers.{layer}.mlp.gate" for layer in (0, 1)]
    assert block == {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", *routers],
    }  # fmt: skip
    assert any("--kv-cache-dtype fp8" in warning for warning in report.warnings)


# ---- the same numbers under other names


def codes_of_rows(packed: torch.Tensor) -> torch.Tensor:
    """INT4 codes of Model Optimizer's bytes: row 2r in the low nibble, two's complement."""
    nibbles = torch.stack([packed & 15, packed >> 4], dim=1).flatten(0, 1).int()
    return torch.where(nibbles > 7, nibbles - 16, nibbles)


def codes_of_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of compressed-tensors' words: offset by half the range, the first input lowest."""
    unsigned = words.long() & 0xFFFFFFFF
    places = [((unsigned >> (bits * i)) % 2**bits) - 2 ** (bits - 1) for i in range(32 // bits)]
    return torch.stack(places, dim=-1).flatten(-2).int()


def renamed(modelopt: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What compressed-tensors should hold for one module; packed words are given as their codes."""
    weight, scale = modelopt["weight"], modelopt["weight_scale"]
    if "weight_scale_2" in modelopt:
        found = {"weight_packed": weight, "weight_scale": scale}
        found["weight_global_scale"] = 1 / modelopt["weight_scale_2"].reshape(1)
        if "input_scale" in modelopt:
            found["input_global_scale"] = 1 / modelopt["input_scale"].reshape(1)
        return found
    if scale.dtype == torch.uint8:
        return {"weight_packed" if weight.dtype == torch.uint8 else "weight": weight, "weight_scale": scale}
    if weight.dtype == torch.uint8:
        codes = codes_of_rows(weight)
        return {"weight_packed": codes, "weight_scale": scale, "weight_shape": torch.tensor(codes.shape)}
    found = {"weight": weight, "weight_scale": scale[:, 0, :, 0] if scale.dim() == 4 else scale[..., None]}
    return found | ({"input_scale": modelopt["input_scale"].reshape(1)} if "input_scale" in modelopt else {})


def modules_of(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, local = name.rpartition(".")
        found.setdefault(module, {})[local] = tensor
    return found


PRESETS = [preset for preset in DENSE if preset not in ("nvfp4_mlp_only", "mxfp4_mlp_weight_only")]


@pytest.mark.parametrize("preset", PRESETS)
def test_compressed_tensors_holds_the_numbers_of_modelopt(
    preset: str, tiny: Callable, quantize: Callable[..., Path]
) -> None:
    source = tiny("qwen3_moe_wide")
    options = {"kv_cache_qformat": "none", "skip_generate": True}
    ours = modules_of(load_tensors(quantize(source, preset, name="modelopt", **options)))
    theirs = modules_of(load_tensors(quantize(source, preset, name="ct", export_fmt="compressed-tensors", **options)))
    assert ours.keys() == theirs.keys()
    quantized = 0
    for module, tensors in ours.items():
        expected, found = tensors, theirs[module]
        if "weight_scale" in tensors:
            quantized += 1
            expected = renamed(tensors)
            if preset == "int8_weight_only":
                expected = {
                    "weight_packed": tensors["weight"].int(), "weight_scale": tensors["weight_scale"][..., None],
                    "weight_shape": torch.tensor(tensors["weight"].shape),
                }  # fmt: skip
            if "weight_shape" in expected:
                bits = 8 if preset == "int8_weight_only" else 4
                found = found | {"weight_packed": codes_of_words(found["weight_packed"], bits)}
        assert expected.keys() == found.keys()
        for local, tensor in expected.items():
            assert tensor.dtype == found[local].dtype, (module, local)
            assert torch.equal(tensor, found[local]), (module, local)
    assert quantized == 2 * (4 + 8 * 3)


def test_the_scales_of_a_cache_are_where_compressed_tensors_has_them(tiny: Callable, quantize: Callable) -> None:
    source = tiny("llama_wide")
    modelopt = load_tensors(quantize(source, "fp8", name="modelopt", kv_cache_qformat="fp8"))
    options = {"export_fmt": "compressed-tensors", "kv_cache_qformat": "fp8"}
    export = quantize(source, "fp8", name="ct", **options)
    found = load_tensors(export)
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.self_attn"
        for kind in "kv":
            assert torch.equal(found[f"{prefix}.{kind}_scale"], modelopt[f"{prefix}.{kind}_proj.{kind}_scale"][None])
    block = json.loads((export / "config.json").read_text())["quantization_config"]
    assert block["kv_cache_scheme"] == {
        "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True,
    }  # fmt: skip


# ---- what a layout cannot express


@pytest.mark.parametrize(
    ("preset", "layout", "kv", "says"),
    [
        ("mxfp6", "compressed-tensors", "none", r"weights in mxfp6 .*--export_fmt can be modelopt, fakequant"),
        ("fp8", "fp8", "none", r"weights in fp8 .*--export_fmt can be modelopt, compressed-tensors, fakequant"),
        ("fp8", "compressed-tensors", "nvfp4", r"cannot hold keys in nvfp4 .*--export_fmt modelopt, fakequant"),
        ("fp8_2d_blockwise_weight_only", "fp8", "fp8", r"a calibrated KV.*modelopt, compressed-tensors, fakequant"),
        ("fp8", "modelopt", "fp8_affine", r"no server reads the mean of each channel.*--export_fmt fakequant"),
    ],
)  # fmt: skip
def test_refused_naming_layouts_that_can(
    preset: str, layout: str, kv: str, says: str, tiny: Callable, quantize: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"(?s)" + says):
        quantize(tiny("llama_wide"), preset, export_fmt=layout, kv_cache_qformat=kv)
    assert not list(tmp_path.iterdir())
