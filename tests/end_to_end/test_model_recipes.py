"""The recipes for single models on tiny models of their types, and what no shipped recipe quantizes.

There is no Step-3.5 in transformers, and the hub stores its experts in one tensor a layer: its recipe is held against
the names of its checkpoint. Kimi-K2 is of the type deepseek_v3; Kimi-K3 is tried on Kimi-Linear, which has the same two
kinds of attention.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import load_tensors
from torch import nn

from hf_ptq.quantization.recipe import RECIPES_DIR, list_models, list_presets, load_recipe
from hf_ptq.quantization.rules import Place, settle
from hf_ptq.report import Report

# Recipe, tiny model -> algorithm of the modules whose names match, in order; what matches none stays as it is.
EXPECTED: dict[tuple[str, str], dict[str, str]] = {
    ("qwen3_moe-nvfp4_experts", "qwen3_moe"): {r"\.experts\.\d": "NVFP4"},
    ("qwen3_moe-w4a16_nvfp4_fp8_attention", "qwen3_moe"): {r"\.experts\.\d": "W4A16_NVFP4", "self_attn": "FP8"},
    ("deepseek_v3-nvfp4", "deepseek_v3"): {r"\.mlp\.(experts|shared_experts|(gate|up|down)_proj)": "NVFP4"},
    ("minimax_m2-nvfp4", "minimax_m2"): {r"\.experts\.\d": "NVFP4"},
    ("glm4_moe-nvfp4", "glm4_moe"): {r"\.mlp\.(experts|shared_experts|(gate|up|down)_proj)": "NVFP4"},
    ("nemotron_h-nvfp4_conservative", "nemotron_h"): {r"experts|mixer\.(up|down)_proj": "NVFP4"},
    ("nemotron_h-nvfp4_aggressive", "nemotron_h"): {
        r"shared_experts|mixer\.(in|out)_proj": "FP8",
        r"experts|mixer\.(up|down)_proj": "NVFP4",
    },
    ("kimi-nvfp4_experts_fp8_attention", "deepseek_v3_wide"): {r"\.experts\.\d": "NVFP4", "self_attn": "fp8_pb_wo"},
    ("kimi-nvfp4_experts_fp8_attention", "kimi_linear"): {
        r"\.experts\.\d": "NVFP4",
        r"self_attn\.(?!\w+_conv1d)": "fp8_pb_wo",
    },
}
BY_NAMES = {"step3p5-nvfp4_mlp"}


def test_every_model_recipe_is_tried() -> None:
    assert {recipe for recipe, _ in EXPECTED} | BY_NAMES == {name for name, _ in list_models()}


@pytest.mark.parametrize(("recipe", "model"), EXPECTED)
def test_a_model_recipe(
    recipe: str, model: str, tiny: Callable, quantize: Callable[..., Path], check_export: Callable[[Path, Path], None]
) -> None:
    report = Report(verbose=False)
    export = quantize(tiny(model), recipe, report=report)
    check_export(tiny(model), export)
    block = json.loads((export / "config.json").read_text())["quantization_config"]
    tensors = load_tensors(export)
    listed = {module: entry["quant_algo"] for module, entry in (block.get("quantized_layers") or {}).items()}
    quantized = {name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")}
    found = {module: listed.get(module, block["quant_algo"]) for module in quantized}
    linears = {name.removesuffix(".weight") for name in tensors if re.search(r"(_proj|_mqa|\.w[123])\.weight$", name)}
    rules = EXPECTED[recipe, model].items()
    meant = {m: next((algo for pattern, algo in rules if re.search(pattern, m)), None) for m in linears}
    assert found == {module: algo for module, algo in meant.items() if algo}
    assert len(linears) > 10
    assert not [warning for warning in report.warnings if "matches no module" in warning]


def test_step_by_the_names_of_its_checkpoint() -> None:
    """Hub: stepfun-ai/Step-3.5-Flash, moe.{gate,up,down}_proj stacked, share_expert and a router beside them."""
    recipe = load_recipe("step3p5-nvfp4_mlp")

    def asked(name: str) -> tuple[str | None, str | None]:
        place = Place((name,), ("Linear", "Module"))
        return settle(recipe.rules, "weight", place).format, settle(recipe.rules, "input", place).format

    layer = "model.layers.4"
    on = [f"{layer}.moe.{p}_proj" for p in ("gate", "up", "down")] + [f"{layer}.mlp.{p}_proj" for p in ("gate", "up")]
    assert [asked(name) for name in on] == [("nvfp4", "nvfp4")] * 5
    parts = ["moe.gate", "share_expert.up_proj", "self_attn.q_proj", "self_attn.g_proj", "input_layernorm"]
    off = [*(f"{layer}.{part}" for part in parts), "lm_head", "vision_model.transformer.resblocks.0.mlp.c_fc"]
    assert [asked(name) for name in off] == [(None, None)] * len(off)
    assert recipe.kv_cache == "fp8"


# ---- what no shipped recipe quantizes


class OnOneProcess(nn.SyncBatchNorm):
    """A subclass that no table lists."""


# What has to be left alone, under the names and of the classes that models have.
LINEARS = (
    "model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate", "model.layers.0.block_sparse_moe.gate",
        "model.layers.0.moe.gate", "backbone.layers.0.mixer.gate", "model.layers.0.feed_forward.router",
        "model.layers.0.mlp.router.layer", "lm_head", "model.language_model.lm_head", "output", "output_layer", "score",
        "model.visual.blocks.0.mlp.up_proj", "vision_tower.layers.0.mlp.up_proj", "model.embed_vision.mlp.up_proj",
        "vision_model.layers.0.mlp.up_proj", "multi_modal_projector.mlp.up_proj", "vit_large_projector", "proj_out",
        "mtp.layers.0.mlp.up_proj", "model.mtp.layers.0.mlp.up_proj",
    )  # fmt: skip
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, OnOneProcess)


@pytest.mark.parametrize("name", [name for name, _ in (*list_presets(), *list_models())])
def test_no_shipped_recipe_quantizes_routers_heads_vision_or_normalisation(name: str) -> None:
    recipe = load_recipe(name)
    for linear in LINEARS:
        place = Place((linear,), ("Linear", "Module"))
        assert not settle(recipe.rules, "weight", place).asks, linear
        assert not settle(recipe.rules, "input", place).asks, linear
    for norm in NORMS:
        classes = tuple(base.__name__ for base in norm.__mro__ if issubclass(base, nn.Module))
        for where in ("model.layers.0.mlp.experts.0.up_proj", "model.layers.0.mixer.in_proj"):
            place = Place((where,), classes)
            assert not settle(recipe.rules, "weight", place).asks, (norm, where)
            assert not settle(recipe.rules, "input", place).asks, (norm, where)


def test_shipped_recipes_are_all_known_by_name() -> None:
    files = [path.stem for folder in ("presets", "models") for path in (RECIPES_DIR / folder).glob("*.yaml")]
    assert len(set(files)) == len(files)
    for name, description in list_models():
        assert load_recipe(name).description == description
        assert len(description) > 20
