"""What a recipe does not do, told once: norms, gates of experts, and what a format does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import save_tiny

from hf_ptq.checkpoint.source import open_source
from hf_ptq.model.build import build_meta_model
from hf_ptq.model.views import weight_views
from hf_ptq.quantization.assignment import Assignment, assign
from hf_ptq.quantization.notices import gate_warnings, unfit_warnings
from hf_ptq.quantization.recipe import Recipe, load_recipe
from hf_ptq.quantization.rules import Rule
from hf_ptq.report import Report

FP8 = Rule(pattern=("*_proj",), weight="fp8", input="fp8")


def give(directory: Path, *rules: Rule) -> Assignment:
    source = open_source(str(directory), None, False, Report(verbose=False))
    meta = build_meta_model(source)
    views = weight_views(meta.placements, source.tensors, meta.stacking)
    return assign(Recipe("mine", "", rules), meta.model, views)


def test_one_warning_for_each_kind_and_reason() -> None:
    assert unfit_warnings([("a.up", "up", "x"), ("b.up", "up", "x"), ("a.up", "up", "x"), ("b.up", "up", "y")]) == [
        "2 modules (a.up ...) are left unquantized: x",
        "b.up is left unquantized: y",
    ]
    assert unfit_warnings([("e", "experts", "x")], "do so") == ["e is left unquantized: x; do so"]


@pytest.mark.parametrize(
    ("model", "pattern", "said"),
    [
        ("llama", "*norm", "7 modules (model.layers.0.input_layernorm ...) of the class LlamaRMSNorm"),
        ("llama", "model.norm", "model.norm of the class LlamaRMSNorm"),
        ("qwen3_moe", "*mlp.gate", "3 modules (model.layers.0.mlp.gate ...) of the class Qwen3MoeTopKRouter"),
    ],
)
def test_a_rule_on_modules_without_quantizers_is_told_once(
    model: str, pattern: str, said: str, tiny: Callable[[str], Path]
) -> None:
    found = give(tiny(model), FP8, Rule(pattern=("*.down_proj", pattern), weight="fp8", input="fp8"))
    (warning,) = found.warnings
    assert warning.startswith(f"recipe mine: pattern {pattern!r} quantizes nothing: {said} have no quantizers")


def test_a_rule_that_turns_norms_off_or_is_about_everything_is_no_news(tiny: Callable[[str], Path]) -> None:
    norms = Rule(pattern=("*norm",), enable=False)
    assert give(tiny("llama"), Rule(pattern=("*",), weight="fp8", input="fp8"), norms).warnings == ()
    optional = Rule(pattern=("*norm",), weight="fp8", optional=True)
    assert give(tiny("llama"), FP8, optional).warnings == ()


@pytest.mark.parametrize("name", ["shared_expert_gate", "gate", "router"])
def test_gates_that_servers_build_unquantized(name: str) -> None:
    (warning,) = gate_warnings([f"model.layers.{i}.mlp.{leaf}" for i in range(3) for leaf in (name, "up_proj")])
    assert warning.startswith(f"3 modules (model.layers.0.mlp.{name} ...) will be quantized")
    assert "add {import: default_disabled} as a last rule" in warning
    assert not list(gate_warnings(["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.experts.0.gate_proj"]))


def test_a_gate_of_a_shared_expert_that_a_rule_for_everything_takes(tmp_path: Path) -> None:
    source = save_tiny("qwen2_moe", tmp_path / "source")
    rule = Rule(pattern=("*",), weight="fp8", input="fp8")
    (warning,) = give(source, rule).warnings
    assert warning.startswith("3 modules (model.layers.0.mlp.shared_expert_gate ...) will be quantized")
    assert give(source, rule, *load_recipe("fp8").rules[1:]).warnings == ()
