"""Quantizers that see a part: of the experts of a layer, and of the time. Together they come to the same ranges."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import CONFIGS
from transformers import AutoModelForCausalLM

from hf_ptq.distributed.plan import Plan
from hf_ptq.model.experts import DOWN_INPUT_QUANTIZER, INPUT_QUANTIZER
from hf_ptq.model.views import WeightView
from hf_ptq.quantization.algorithms import ALGORITHMS
from hf_ptq.quantization.apply import attach_quantizers, not_observing, quantizing
from hf_ptq.quantization.assignment import Assignment, QuantizedWeight
from hf_ptq.quantization.formats.description import FORMATS
from hf_ptq.quantization.quantizer import Quantizer
from hf_ptq.quantization.statistics import Statistics

CPU = torch.device("cpu")
MAX = ALGORITHMS["max"]
ROWS = torch.randn(40, 16, generator=torch.Generator().manual_seed(4))
OWNERS = torch.randint(0, 7, (40,), generator=torch.Generator().manual_seed(5))  # expert 7 gets none
DENSE = torch.randn(6, 16, generator=torch.Generator().manual_seed(6))


def test_the_experts_of_a_rank_are_written_and_no_others() -> None:
    quantizer = Quantizer("experts", FORMATS["nvfp4"], 8, range(2, 5))
    amax, seen = torch.full((8,), 0.5), torch.full((8,), 10.0)
    quantizer.start_observing(amax, seen)
    values = torch.tensor([[1.0, -3.0], [0.25, 0.0], [2.0, 1.0]])
    quantizer.quantize_rows(values, None, torch.tensor([0, 2, 2]))  # counted from the first that is here
    assert amax.tolist() == [0.5, 0.5, 3.0, 0.5, 2.0, 0.5, 0.5, 0.5]
    assert seen.tolist() == [10, 10, 11, 10, 12, 10, 10, 10]


def test_a_rank_without_a_part_sees_all() -> None:
    assert Quantizer("experts", FORMATS["nvfp4"], 8).run_experts == range(8)
    assert Quantizer("linear", FORMATS["nvfp4"]).run_experts == range(1)


def quantizers_of(run: range) -> dict[str, Quantizer]:
    return {"e.gate_up": Quantizer("e.gate_up", FORMATS["nvfp4"], 8, run), "q": Quantizer("q", FORMATS["fp8"])}


def observed(run: range, dense: slice) -> tuple[dict[str, Quantizer], Statistics]:
    """What a rank records of the rows of its own experts, and of its own calibration rows."""
    quantizers = quantizers_of(run)
    statistics = Statistics(MAX.statistics(quantizers), CPU)
    MAX.start(quantizers, statistics)
    mine = torch.tensor([owner in run for owner in OWNERS.tolist()])
    for batch in range(0, 40, 10):
        here = torch.arange(40)[mine & (torch.arange(40) // 10 == batch // 10)]
        quantizers["e.gate_up"].quantize_rows(ROWS[here], None, OWNERS[here] - run.start)
        statistics.commit()
    quantizers["q"](DENSE[dense])
    statistics.commit()
    return quantizers, statistics


def test_ranks_that_share_the_experts_come_to_the_ranges_of_one() -> None:
    plan = Plan("expert-parallel", "cpu", 0, (), 4, 4)
    ranks = [observed(plan.run_experts(8, rank), slice(rank, None, 4)) for rank in range(4)]
    totals: dict[tuple[str, str], list[torch.Tensor]] = {}
    for _, statistics in ranks:
        statistics.reduce(lambda flat, reduction, group: totals.setdefault((reduction, group), []).append(flat))
    assert set(totals) == {("max", "data"), ("sum", "data"), ("max", "expert"), ("sum", "expert")}
    for (reduction, _), flats in totals.items():  # as an all-reduce does
        whole = torch.stack(flats).amax(0) if reduction == "max" else torch.stack(flats).sum(0)
        for flat in flats:
            flat.copy_(whole)
    one, alone = observed(range(8), slice(None))
    assert MAX.finish(one, alone) == []
    experts = one["e.gate_up"]
    assert experts.expert_rows is not None
    assert experts.expert_rows.tolist() == [int((expert == OWNERS).sum()) for expert in range(8)]
    for quantizers, statistics in ranks:
        assert MAX.finish(quantizers, statistics) == []
        mine = quantizers["e.gate_up"]
        assert mine.expert_rows is not None
        assert mine.expert_amax is not None
        assert mine.expert_rows.tolist() == experts.expert_rows.tolist()
        assert mine.expert_amax.tolist() == experts.expert_amax.tolist()  # type: ignore[union-attr]
        assert (mine.amax, quantizers["q"].amax) == (experts.amax, DENSE.abs().max())


# ---- attached to a model


def moe_assignment() -> Assignment:
    experts, fp8 = "model.layers.1.mlp.experts", FORMATS["fp8"]
    up = WeightView(tuple(f"{experts}.{e}.up_proj" for e in range(8)), f"{experts}.gate_up_proj", (32, 64), 32, True)
    down = WeightView(tuple(f"{experts}.{e}.down_proj" for e in range(8)), f"{experts}.down_proj", (64, 32), 0, True)
    query = "model.layers.1.self_attn.q_proj"
    plain = WeightView((query,), f"{query}.weight", (64, 64))
    quantized = [(up, f"{experts}.gate_up"), (down, f"{experts}.down"), (plain, query)]
    return Assignment(tuple(QuantizedWeight(view, fp8, fp8, key, "*") for view, key in quantized), (), None, ())


def test_the_plan_says_which_experts_come_to_a_rank(tiny: Callable[[str], Path]) -> None:
    assert CONFIGS["qwen3_moe"][1]["num_experts"] == 8
    model = AutoModelForCausalLM.from_pretrained(tiny("qwen3_moe"))
    plan = Plan("expert-parallel", "cpu", 0, (), 4, 2)
    quantizers = attach_quantizers(model, moe_assignment(), lambda experts: plan.run_experts(experts, 3))
    assert {key: q.run_experts for key, q in quantizers.items()} == {
        "model.layers.1.mlp.experts.gate_up": range(4, 8),
        "model.layers.1.mlp.experts.down": range(4, 8),
        "model.layers.1.self_attn.q_proj": range(1),
    }
    experts = model.get_submodule("model.layers.1.mlp.experts")
    assert experts.get_submodule(INPUT_QUANTIZER) is quantizers["model.layers.1.mlp.experts.gate_up"]
    assert experts.get_submodule(DOWN_INPUT_QUANTIZER) is quantizers["model.layers.1.mlp.experts.down"]


# ---- switched off for a while


def test_nothing_is_recorded_inside_the_block() -> None:
    quantizers = {name: Quantizer(name, FORMATS["fp8"]) for name in ("observing", "off", "quantizing")}
    pending, seen = torch.zeros(1), torch.zeros(1)
    observing = quantizers["observing"]
    observing.start_observing(pending, seen)
    quantizers["quantizing"].mode = "quantize"

    def block() -> None:
        with not_observing(quantizers.values()):
            assert [q.mode for q in quantizers.values()] == ["off", "off", "quantize"]
            values = torch.tensor([9.0])
            assert observing(values) is values
            raise KeyError

    observing(torch.tensor([-2.0, 1.0]))
    with pytest.raises(KeyError):
        block()
    assert [q.mode for q in quantizers.values()] == ["observe", "off", "quantize"]
    assert (pending.item(), seen.item()) == (2, 1), "what had been recorded stays"
    observing(torch.tensor([3.0]))
    assert (pending.item(), seen.item()) == (3, 2)


def test_blocks_within_each_other() -> None:
    quantizer = Quantizer("q", FORMATS["fp8"])
    quantizer.start_observing(torch.zeros(1), torch.zeros(1))
    with not_observing([quantizer]), not_observing([quantizer]):
        assert quantizer.mode == "off"
    assert quantizer.mode == "observe"
    quantizer.stop_observing(torch.ones(1), torch.ones(1))
    with quantizing([quantizer]), not_observing([quantizer]):
        assert quantizer.mode == "quantize"
    assert quantizer.mode == "off"
