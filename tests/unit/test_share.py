"""Who writes what: every tensor one rank, experts where they are held, the rest evenly; and the files of each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_ptq.checkpoint.shards import TensorPlan
from hf_ptq.checkpoint.source import Source, open_source
from hf_ptq.distributed.plan import Plan
from hf_ptq.export.layouts import LAYOUTS as OUTPUT_LAYOUTS
from hf_ptq.export.planned import PlannedTensors, plan_tensors
from hf_ptq.export.share import Share
from hf_ptq.export.share import share_out as share_out_by_module
from hf_ptq.export.tensors import Output, written_modules
from hf_ptq.model.build import build_meta_model
from hf_ptq.model.units import split_units
from hf_ptq.model.views import WeightView, weight_views
from hf_ptq.quantization.assignment import Assignment, QuantizedWeight, assign
from hf_ptq.quantization.formats.description import FORMATS
from hf_ptq.quantization.recipe import load_recipe
from hf_ptq.report import Report

LAYOUTS = {
    "single": Plan("single", "cpu", 0, ()),
    "replicated 3": Plan("replicated", "cpu", 0, (), 3),
    "expert-parallel 2": Plan("expert-parallel", "cpu", 0, (), 2, 2),
    "two groups of 2": Plan("expert-parallel", "cpu", 0, (), 4, 2),
    "two groups of 4, dense sharded": Plan("expert-parallel", "cpu", 0, (), 8, 4, "fsdp"),
    "fsdp2 5": Plan("fsdp2", "cpu", 0, (), 5, 1, "fsdp"),
    "more ranks than experts": Plan("fsdp2", "cpu", 0, (), 11, 1, "fsdp"),
}


def linear(module: str) -> QuantizedWeight:
    view = WeightView((module,), f"{module}.weight", (4, 8))
    return QuantizedWeight(view, FORMATS["fp8"], None, module, "*")


def experts(stack: str, count: int) -> QuantizedWeight:
    view = WeightView(tuple(f"{stack}.{e}.up" for e in range(count)), f"{stack}.up", (4, 8), is_stacked=True)
    return QuantizedWeight(view, FORMATS["fp8"], None, f"{stack}.up", "*")


def assignment(*quantized: QuantizedWeight) -> Assignment:
    return Assignment(quantized, (), None, ())


def num_bytes(name: str, size: int) -> TensorPlan:
    return TensorPlan(name, "U8", (size,))


def share_out(planned: list[TensorPlan], found: Assignment, plan: Plan) -> dict[str, int]:
    """With the tensors of a module known by what stands before their last dot."""
    parents = {tensor.name: tensor.name.rpartition(".")[0] for tensor in planned}
    module_of = {name: parent for name, parent in parents.items() if parent in found.by_module}
    return share_out_by_module(planned, module_of, found, plan)


# ---- by hand


def test_the_rank_with_the_fewest_bytes_is_next() -> None:
    planned = [num_bytes(*pair) for pair in (("embed", 100), ("a", 10), ("b", 60), ("c", 20), ("norm", 1), ("d", 40))]
    owners = share_out(planned, assignment(), LAYOUTS["replicated 3"])
    assert owners == {"embed": 0, "a": 1, "b": 2, "c": 1, "norm": 1, "d": 1}


def test_all_tensors_of_a_module_go_the_same_way() -> None:
    """Codes and scales, wherever they stand in the plan; a tensor that belongs to no linear goes by itself."""
    names = ["a.weight", "b.weight", "a.weight_scale", "norm.weight", "b.weight_scale", "norm.bias", "a.k_scale"]
    planned = [num_bytes(name, 10) for name in names]
    owners = share_out(planned, assignment(linear("a"), linear("b")), LAYOUTS["replicated 3"])
    assert owners == {
        "a.weight": 0, "a.weight_scale": 0, "a.k_scale": 0, "b.weight": 1, "b.weight_scale": 1,
        "norm.weight": 2, "norm.bias": 2,
    }  # fmt: skip


def test_scales_count_with_their_module() -> None:
    planned = [num_bytes("a.weight", 10), num_bytes("b.weight", 15), num_bytes("a.scale", 10), num_bytes("c", 1)]
    owners = share_out(planned, assignment(linear("a"), linear("b")), LAYOUTS["expert-parallel 2"])
    assert owners == {"a.weight": 0, "a.scale": 0, "b.weight": 1, "c": 1}


def test_experts_are_written_where_they_are_and_the_rest_makes_up_for_them() -> None:
    planned = [num_bytes("embed", 20)] + [num_bytes(f"e.{e}.up.weight", 10) for e in range(8)]
    planned += [num_bytes(f"e.{e}.up.scale", 1) for e in range(8)] + [num_bytes("head", 12)]
    quantized = assignment(experts("e", 8))
    owners = share_out(planned, quantized, LAYOUTS["two groups of 2"])
    for leaf in ("weight", "scale"):
        assert [owners[f"e.{e}.up.{leaf}"] for e in range(8)] == [0, 0, 2, 2, 1, 1, 3, 3]
    assert (owners["embed"], owners["head"]) == (0, 1)
    owners = share_out(planned, quantized, LAYOUTS["replicated 3"])
    assert [owners[f"e.{e}.up.weight"] for e in range(8)] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert (owners["embed"], owners["head"]) == (2, 0), "the last rank has fewer experts"


def test_experts_that_are_not_quantized_go_anywhere() -> None:
    """Their bytes are copied from the source, which every rank sees."""
    planned = [num_bytes(f"e.{e}.up.weight", 10) for e in range(8)]
    owners = share_out(planned, assignment(), LAYOUTS["expert-parallel 2"])
    assert list(owners.values()) == [0, 1] * 4


@given(
    st.lists(st.integers(0, 1000), max_size=40), st.integers(0, 12), st.integers(0, 500), st.sampled_from(list(LAYOUTS))
)
def test_the_ranks_end_up_even(sizes: list[int], stack: int, size: int, layout: str) -> None:
    """No rank has more than the mean and one module, unless its experts alone are more."""
    plan = LAYOUTS[layout]
    count = stack * plan.ep_degree
    planned = [num_bytes(f"e.{e}.up.weight", size) for e in range(count)]
    planned += [num_bytes(f"m{i}.weight", n) for i, n in enumerate(sizes)]
    owners = share_out(planned, assignment(experts("e", count)) if count else assignment(), plan)
    assert owners.keys() == {tensor.name for tensor in planned}
    loads: Counter[int] = Counter()
    for tensor in planned:
        loads[owners[tensor.name]] += tensor.num_bytes
    mean = sum(loads.values()) / plan.world_size
    most_experts = max(len(plan.written_experts(count, rank)) for rank in range(plan.world_size)) * size
    assert max(loads.values(), default=0) <= max(most_experts, mean + max(sizes, default=0))
    assert set(loads) <= set(range(plan.world_size))


# ---- of a model


@pytest.fixture(scope="module")
def of_model(tiny: Callable[[str], Path]) -> Callable[[str], tuple[PlannedTensors, Assignment, Source]]:
    """A mixture of experts in NVFP4 with calibrated scales of the KV cache, in an output layout."""
    source = open_source(str(tiny("deepseek_v3")), None, False, Report(verbose=False))
    meta = build_meta_model(source)
    views = weight_views(meta.placements, source.tensors, meta.stacking)
    found = assign(load_recipe("nvfp4").with_kv("fp8"), meta.model, views)
    units = split_units(meta.model, meta.placements)
    return lambda layout: (plan_tensors(units, source, found, OUTPUT_LAYOUTS[layout]), found, source)


@pytest.mark.parametrize("output_layout", ["modelopt", "compressed-tensors", "fakequant"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_every_tensor_of_a_model_has_one_writer(
    layout: str, output_layout: str, of_model: Callable[[str], tuple[PlannedTensors, Assignment, Source]]
) -> None:
    """What the ranks write is everything, once; and what a rank encodes is what it writes."""
    planned, found, source = of_model(output_layout)
    tensors, plan = [*planned.weights, *planned.state], LAYOUTS[layout]
    owners = share_out_by_module(tensors, planned.module_of, found, plan)
    assert list(owners) == [tensor.name for tensor in tensors]
    writer: Any = None  # nothing is written
    outputs = [
        Output(OUTPUT_LAYOUTS[output_layout], Share(rank, plan, owners), writer, source)
        for rank in range(plan.world_size)
    ]
    modules = Counter(m for output in outputs for weight in found.quantized for m in written_modules(weight, output))
    assert modules == Counter(list(found.by_module))
    for name, module in planned.module_of.items():
        assert owners[name] == next(
            o.share.rank for o in outputs if module in written_modules(found.by_module[module], o)
        )
