"""Our experts forward: equal to transformers' own, and what its quantizers see is what a loop over experts sees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from tiny import CONFIGS, build
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_ptq.model import experts as ours
from hf_ptq.model.experts import grouped_linear, looped_linear, takes_registry, use_our_experts
from hf_ptq.quantization.formats.description import FORMATS
from hf_ptq.quantization.quantizer import Quantizer

FAMILIES = ("qwen3_moe", "qwen3_moe_starved", "mixtral", "deepseek_v3", "glm4_moe", "minimax_m2")
IDS = torch.randint(3, 250, (3, 40), generator=torch.Generator().manual_seed(7))


def load(tiny: Callable[[str], Path], name: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny(name), dtype=dtype).eval()


def observe(model: PreTrainedModel) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Run the model with observers on all experts; quantizer name -> (amax, rows) of each expert."""
    seen = {}
    for name, module in model.named_modules():
        if not takes_registry(module):
            continue
        for leaf in (ours.INPUT_QUANTIZER, ours.DOWN_INPUT_QUANTIZER):
            quantizer = Quantizer(name, FORMATS["nvfp4"], module.num_experts)
            pair = torch.zeros(module.num_experts), torch.zeros(module.num_experts)
            quantizer.start_observing(*pair)
            module.add_module(leaf, quantizer)
            seen[f"{name}.{leaf}"] = pair
    with torch.no_grad():
        model(IDS)
    return seen


def brute_force(model: PreTrainedModel) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The same by a loop over experts, on what the model itself hands to its experts modules."""
    seen = {}

    def record(name: str):
        def hook(module, arguments) -> None:
            hidden, index, _ = arguments
            inputs, downs = torch.zeros(module.num_experts), torch.zeros(module.num_experts)
            rows = torch.zeros(module.num_experts)
            for expert in range(module.num_experts):
                tokens = hidden[(index == expert).any(-1)]
                if len(tokens):
                    inner = module._apply_gate(torch.nn.functional.linear(tokens, module.gate_up_proj[expert]))
                    inputs[expert], downs[expert], rows[expert] = tokens.abs().max(), inner.abs().max(), len(tokens)
            seen[f"{name}.{ours.INPUT_QUANTIZER}"] = inputs, rows
            seen[f"{name}.{ours.DOWN_INPUT_QUANTIZER}"] = downs, rows

        return hook

    for name, module in model.named_modules():
        if takes_registry(module):
            module.register_forward_pre_hook(record(name))
    with torch.no_grad():
        model(IDS)
    return seen


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("implementation", list(ours.KERNELS))
def test_logits_are_those_of_transformers(name: str, implementation: str, tiny: Callable[[str], Path]) -> None:
    model = load(tiny, name, torch.float32)
    model.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        expected = model(IDS).logits
        use_our_experts(model, implementation)
        got = model(IDS).logits
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert model.config._experts_implementation == f"hf_ptq_{implementation}"


@pytest.mark.parametrize("name", FAMILIES)
def test_both_kernels_and_a_loop_see_the_same(name: str, tiny: Callable[[str], Path]) -> None:
    """Bit for bit in bf16: amax of both inputs of every expert, and its number of tokens."""
    seen = []
    for implementation in ours.KERNELS:
        model = load(tiny, name)
        use_our_experts(model, implementation)
        seen.append(observe(model))
    model = load(tiny, name)
    use_our_experts(model, "eager")
    expected = brute_force(model)
    assert expected.keys() == seen[0].keys() == seen[1].keys()
    for key, (amax, rows) in expected.items():
        for found in seen:
            assert torch.equal(found[key][0], amax), key
            assert torch.equal(found[key][1], rows), key


def test_starved_experts_see_nothing(tiny: Callable[[str], Path]) -> None:
    model = load(tiny, "qwen3_moe_starved")
    use_our_experts(model, "grouped_mm")
    for amax, rows in observe(model).values():
        assert rows[6:].tolist() == [0, 0]
        assert amax[6:].tolist() == [0, 0]
        assert rows.sum() == 2 * IDS.numel()


@pytest.mark.parametrize("sizes", [(16, 24), (12, 24), (16, 20), (5, 7)])
def test_sizes_that_the_grouped_kernel_cannot_take_are_looped(sizes: tuple[int, int]) -> None:
    inputs, outputs = sizes
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(10, inputs, generator=generator).bfloat16()
    weight = torch.randn(3, inputs, outputs, generator=generator).bfloat16()
    ends = torch.tensor([4, 4, 10], dtype=torch.int32)
    expected = torch.cat([rows[:4] @ weight[0], rows[4:] @ weight[2]])
    assert torch.equal(looped_linear(rows, weight, ends, None), expected)
    assert torch.allclose(grouped_linear(rows, weight, ends, None).float(), expected.float(), rtol=1e-2, atol=1e-2)


def test_rows_are_recorded_for_their_experts_and_a_nan_stays() -> None:
    quantizer = Quantizer("experts", FORMATS["fp8"], 3)
    amax, rows = torch.zeros(3), torch.zeros(3)
    quantizer.start_observing(amax, rows)
    values = torch.tensor([[0.5, 1.0], [1.0, -2.0], [float("nan"), 1.0], [0.0, 0.0]])
    assert quantizer.quantize_rows(values, None, torch.tensor([0, 1, 2, 1])) is values
    assert amax[:2].tolist() == [1, 2]
    assert amax[2].isnan()
    assert rows.tolist() == [1, 2, 1], "a row of zeros is a row"
    picked = quantizer.quantize_rows(values, torch.tensor([1, 1, 0]), torch.tensor([0, 0, 1]))
    assert picked.tolist() == [[1.0, -2.0], [1.0, -2.0], [0.5, 1.0]]
    assert (amax[:2].tolist(), rows.tolist()) == ([2, 2], [3, 3, 1])


def observed_layer() -> tuple[torch.nn.Module, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """A layer's 8 experts, observed; quantizer -> (amax, rows) of each expert."""
    class_name, options = CONFIGS["qwen3_moe"]
    model = build("qwen3_moe", getattr(transformers, class_name)(**options), torch.float32)
    use_our_experts(model, "eager")
    experts = next(module for module in model.modules() if takes_registry(module))
    seen = {}
    for leaf in (ours.INPUT_QUANTIZER, ours.DOWN_INPUT_QUANTIZER):
        seen[leaf] = torch.zeros(8), torch.zeros(8)
        quantizer = Quantizer(leaf, FORMATS["fp8"], 8)
        quantizer.start_observing(*seen[leaf])
        experts.add_module(leaf, quantizer)
    return experts, seen


@torch.no_grad()
def test_no_tokens_gives_no_rows_to_the_experts_and_ends_with_the_block() -> None:
    experts, seen = observed_layer()
    hidden, choices, weights = torch.randn(3, 64), torch.tensor([[0], [1], [2]]), torch.ones(3, 1)

    def fail_in_the_block() -> None:
        with ours.no_tokens(torch.nn.ModuleList([experts])):
            assert experts(hidden, choices, weights).tolist() == [[0.0] * 64] * 3
            assert all(tensor.tolist() == [0.0] * 8 for pair in seen.values() for tensor in pair)
            raise KeyError

    with pytest.raises(KeyError):
        fail_in_the_block()
    assert experts(hidden, choices, weights).abs().amax(-1).min() > 0
    assert seen[ours.INPUT_QUANTIZER][1].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


def test_the_decode_never_leaves_our_experts(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` replaces the name grouped_mm by batched_mm on a GPU, which knows no quantizers; ours it leaves."""
    model = load(tiny, "qwen3_moe")
    use_our_experts(model, "grouped_mm")
    calls = []
    for module in model.modules():
        if takes_registry(module):
            module.register_forward_hook(lambda m, *_: calls.append(m.config._experts_implementation))
    monkeypatch.setattr(type(model), "device", property(lambda _: torch.device("cuda")))
    with model._optimize_model_for_decode():
        monkeypatch.undo()
        with torch.no_grad():
            model(IDS[:, :1])
    assert set(calls) == {"hf_ptq_grouped_mm"}
