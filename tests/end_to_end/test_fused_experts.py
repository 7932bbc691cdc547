"""Experts that the hub keeps in one tensor a layer: written one by one where servers read them so, else as one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_quantized import Captured, logits_of
from rich.console import Console
from tiny import load_tensors, raw, save_tiny, save_tiny_vision
from transformers import AutoModelForCausalLM

from hf_ptq.errors import RunError, UserError
from hf_ptq.quantization.formats import codecs
from hf_ptq.report import Report

LAYER = "model.language_model.layers.1.mlp.experts"
FUSED = "model.layers.1.mlp.experts"
OPTIONS = {"kv_cache_qformat": "none"}
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Values of nibbles that are packed along the last dimension, the low one first."""
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()
    return VALUES[nibbles & 7] * (1 - 2 * (nibbles >> 3))


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision(tmp_path_factory.mktemp("vision"))


def test_experts_of_a_vision_model_are_written_one_by_one(vision: Path, quantize: Callable[..., Path]) -> None:
    """[experts, inputs, gate rows + up rows] on the hub."""
    before, after = load_tensors(vision), load_tensors(quantize(vision, "fp8", **OPTIONS))
    experts, hidden, both = before[f"{LAYER}.gate_up_proj"].shape
    height = both // 2
    for expert in range(experts):
        parts = {
            "gate_proj": before[f"{LAYER}.gate_up_proj"][expert, :, :height].T,
            "up_proj": before[f"{LAYER}.gate_up_proj"][expert, :, height:].T,
            "down_proj": before[f"{LAYER}.down_proj"][expert].T,
        }
        group = torch.maximum(parts["gate_proj"].abs().max(), parts["up_proj"].abs().max())
        for leaf, weight in parts.items():
            scale = (parts[leaf].abs().max() if leaf == "down_proj" else group).float() / 448
            name = f"{LAYER}.{expert}.{leaf}"
            assert after[f"{name}.weight_scale"] == scale
            assert torch.equal(after[f"{name}.weight"], (weight.float() / scale).to(torch.float8_e4m3fn))
    assert after[f"{LAYER}.0.down_proj.weight"].shape == (hidden, height)
    assert not any(name.startswith(LAYER) and name.endswith("experts.down_proj") for name in after)
    assert all(raw(before[n]) == raw(after[n]) for n in before if ".visual." in n or "embed" in n or "norm" in n)


def test_experts_that_stay_unquantized_stay_as_they_are(vision: Path, quantize: Callable[..., Path], tmp_path) -> None:
    recipe = tmp_path / "recipe.yaml"
    rules = ['{pattern: "*self_attn*", weight: fp8, input: fp8}', "{import: default_disabled}"]
    recipe.write_text("rules:\n" + "".join(f"  - {rule}\n" for rule in rules) + "algorithm: max\n")
    export = quantize(vision, recipe=str(recipe), **OPTIONS)
    before, after = load_tensors(vision), load_tensors(export)
    for name in before:
        if ".experts." in name:
            assert raw(before[name]) == raw(after[name])
    block = json.loads((export / "config.json").read_text())["quantization_config"]
    assert LAYER in block["ignore"]


@pytest.fixture(scope="module")
def interleaved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts with alternating gate and up rows."""
    return save_tiny("gpt_oss_wide", tmp_path_factory.mktemp("interleaved") / "source")


def test_interleaved_experts_stay_in_one_tensor(interleaved: Path, quantize: Callable[..., Path]) -> None:
    """Names, shapes and numbers are Model Optimizer's: codes along the inputs, which are the second dimension."""
    report = Report(verbose=False)
    before, after = load_tensors(interleaved), load_tensors(quantize(interleaved, "nvfp4", report=report, **OPTIONS))
    for leaf in ("gate_up_proj", "down_proj"):
        weight = before[f"{FUSED}.{leaf}"]
        experts, inputs, rows = weight.shape
        assert after[f"{FUSED}.{leaf}"].shape == (experts, inputs // 2, rows)
        assert after[f"{FUSED}.{leaf}_weight_scale"].shape == (experts, inputs // 16, rows)
        scale_2, scale = after[f"{FUSED}.{leaf}_weight_scale_2"], after[f"{FUSED}.{leaf}_weight_scale"]
        assert scale_2 == weight.abs().max().float() / (6 * 448)
        assert after[f"{FUSED}.{leaf}_input_scale"].shape == ()
        step = (scale.float() * scale_2).repeat_interleave(16, dim=1)
        decoded = e2m1(after[f"{FUSED}.{leaf}"].transpose(1, 2)).transpose(1, 2) * step
        expected = codecs()["nvfp4"].decode(
            codecs()["nvfp4"].encode(weight.transpose(1, 2), weight.abs().max().float().expand(experts))
        )
        assert torch.equal(decoded.transpose(1, 2), expected)
        assert raw(before[f"{FUSED}.{leaf}_bias"]) == raw(after[f"{FUSED}.{leaf}_bias"])
    assert any("one tensor" in warning for warning in report.warnings)


def test_fakequant_of_interleaved_experts_computes_what_our_model_does(
    interleaved: Path, quantize: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(3, 35)[None]
    ours = Captured(monkeypatch, logits_of(ids), lambda _: False)
    export = quantize(interleaved, "nvfp4", export_fmt="fakequant", skip_generate=False, **OPTIONS)
    loaded = AutoModelForCausalLM.from_pretrained(export, dtype=torch.bfloat16).eval()
    loaded.set_experts_implementation("hf_ptq_grouped_mm")
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, ours.value)


def test_layouts_without_names_for_them_are_refused(interleaved: Path, quantize: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=r"(?s)no names for experts in one tensor.*modelopt, fakequant"):
        quantize(interleaved, "fp8", export_fmt="compressed-tensors", **OPTIONS)


def test_a_tower_that_text_does_not_reach_stops_the_run_at_its_first_batch(vision: Path, quantize, tmp_path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('rules:\n  - {import: fp8}\n  - {pattern: "*visual*", weight: fp8, input: fp8}\n')
    report = Report(Console(quiet=True), verbose=False)
    with pytest.raises(RunError) as caught:
        quantize(vision, recipe=str(recipe), report=report, batch_size=1, **OPTIONS)
    kinds = ", ".join(
        f"model.visual.{kind}"
        for kind in (
            "blocks.0.attn.proj", "blocks.0.attn.qkv", "blocks.0.mlp.linear_fc1", "blocks.0.mlp.linear_fc2",
            "deepstack_merger_list.0.linear_fc1", "deepstack_merger_list.0.linear_fc2", "merger.linear_fc1",
            "merger.linear_fc2",
        )
    )  # fmt: skip
    assert caught.value.problems[0].what == (
        f"8 modules were never called in calibration, so their inputs have no range: {kinds}"
    )
    quoted = ", ".join(f'"{kind}"' for kind in kinds.split(", "))
    assert f"last rule, {{pattern: [{quoted}], enable: false}}" in caught.value.problems[0].cure
    assert [stage["name"] for stage in report.stages] == ["data", "load", "calibrate"]
    warned = [text for text in report.warnings if "outside of the language model" in text]
    assert len(warned) == 1
    assert warned[0].startswith("8 linears outside of the language model get static input ranges")
    assert "model.visual.blocks.*.attn.qkv (1)" in warned[0]
    cured = recipe.read_text() + f"  - {{pattern: [{quoted}], enable: false}}\n"
    recipe.write_text(cured)
    quantize(vision, recipe=str(recipe), name="cured", **OPTIONS)


def test_no_warning_of_towers_that_stay_as_they_are(vision: Path, quantize) -> None:
    report = Report(Console(quiet=True), verbose=False)
    quantize(vision, "fp8", report=report, **OPTIONS)
    assert not any("outside of the language model" in text for text in report.warnings)
