"""Weights with NaN or infinity are named by their tensor in the source, as far as this rank holds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_ptq.checkpoint.slices import SourceReader
from hf_ptq.checkpoint.source import open_source
from hf_ptq.errors import RunError
from hf_ptq.model.build import build_meta_model
from hf_ptq.model.fill import Filler
from hf_ptq.model.finite import refuse_nonfinite
from hf_ptq.model.units import split_units
from hf_ptq.model.views import weight_views
from hf_ptq.report import Report

LAYER = "model.layers.1"
EXPERTS, STACK = f"{LAYER}.mlp.experts", f"{LAYER}.mlp.experts.gate_up_proj"
QUERY, NORM = f"{LAYER}.self_attn.q_proj.weight", f"{LAYER}.input_layernorm.weight"
Damage = Callable[[Callable[[str], torch.Tensor]], None]


def damaged(directory: Path, held: dict[str, range], damage: Damage) -> list[str]:
    """What is said of layer 1 as a rank holds it, after `damage` to its parameters."""
    source = open_source(str(directory), None, False, Report(verbose=False))
    meta = build_meta_model(source)
    views = {m: v for v in weight_views(meta.placements, source.tensors, meta.stacking) for m in v.modules}
    unit = next(unit for unit in split_units(meta.model, meta.placements) if unit.name == LAYER)
    with SourceReader(source) as reader, Filler(meta, reader, torch.device("cpu"), held=held) as filler:
        list(filler.fill([unit], lambda _: None))
    with torch.no_grad():
        damage(meta.model.get_parameter)
    try:
        refuse_nonfinite(unit, meta.model, meta.placements, views, held)
    except RunError as error:
        return [problem.what.removesuffix(" holds NaN or infinity") for problem in error.problems]
    return []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("held", [{}, {STACK: range(2, 5), QUERY: range(10, 20)}], ids=["whole", "a share"])
def test_a_damaged_tensor_is_named(tiny: Callable[[str], Path], held: dict[str, range], value: float) -> None:
    """Of a stack, the expert and the projection that the rows belong to, counted from the first expert held."""
    first = held[STACK].start if held else 0

    def damage(parameter: Callable[[str], torch.Tensor]) -> None:
        parameter(STACK)[3 - first, 40, 7] = value  # row 8 of the up projection
        parameter(STACK)[4 - first, 0, 0] = value
        parameter(QUERY)[-1, -1] = value
        parameter(NORM)[0] = value

    expected = {f"{EXPERTS}.3.up_proj.weight", f"{EXPERTS}.4.gate_proj.weight", QUERY, NORM}
    found = damaged(tiny("qwen3_moe"), held, damage)
    assert set(found) == expected
    assert len(found) == len(expected)


@pytest.mark.parametrize(
    "held",
    [{}, {STACK: range(2, 5), QUERY: range(10, 20)}, {STACK: range(0), QUERY: range(64, 64), NORM: range(64, 64)}],
    ids=["whole", "a share", "nothing"],
)
def test_sound_weights_pass(tiny: Callable[[str], Path], held: dict[str, range]) -> None:
    assert damaged(tiny("qwen3_moe"), held, lambda _: None) == []
