"""Which row of an exchange of tokens goes where: against plain loops over ranks, tokens and choices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tiny import CONFIGS, build

from hf_ptq.model.exchange import NONE, count_rows, numbered_at, order_of_outputs, places_of_outputs
from hf_ptq.model.experts import KERNELS, choice_outputs, kernel_of, looped_linear, takes_registry, use_our_experts

TOKENS, K, LOCAL, RANKS = st.integers(0, 9), st.integers(1, 4), st.integers(1, 3), st.integers(2, 4)


@given(TOKENS, K, LOCAL, RANKS, st.data())
def test_each_token_goes_once_to_each_rank_that_it_needs(tokens: int, k: int, local: int, ranks: int, data: Any):
    """Rank `kept` is sent nothing, and its outputs, given in any order, come first."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    kept = data.draw(st.sampled_from([NONE, *range(ranks)]))
    index = torch.randint(0, local * ranks, (tokens, k), generator=generator)
    needed, counts = count_rows(index // local, ranks, kept)
    pairs: dict[int, list[int]] = {rank: [] for rank in (kept, *range(ranks))}
    expected_needed, expected_counts = [], []
    for rank in range(ranks):
        here = range(rank * local, (rank + 1) * local)
        rows = index.tolist()
        assert numbered_at(index, rank, local).tolist() == [
            [e - here.start if e in here else local for e in row] for row in rows
        ]
        pairs[rank] = [t * k + slot for t, row in enumerate(rows) for slot, e in enumerate(row) if e in here]
        sent = [t for t, row in enumerate(rows) if rank != kept and any(e in here for e in row)]
        expected_needed += [[rank, t] for t in sent]
        expected_counts.append([len(sent), 0 if rank == kept else len(pairs[rank])])
    assert needed.nonzero().tolist() == expected_needed
    assert counts.tolist() == expected_counts
    assert numbered_at(index, torch.arange(tokens)[:, None] % ranks, local).dtype == torch.int32

    mixed = torch.randperm(len(pairs[kept]), generator=generator)  # where the outputs of its own experts are
    own = torch.tensor(pairs[kept], dtype=torch.int64)
    elsewhere = torch.tensor([pair for rank in range(ranks) if rank != kept for pair in pairs[rank]], dtype=torch.int64)
    outputs = torch.cat([torch.empty_like(own).scatter_(0, mixed, own), elsewhere])  # a choice's output is its number
    places = places_of_outputs(order_of_outputs(index // local, kept), mixed)
    assert outputs[places].tolist() == list(range(tokens * k))


def one_layer(implementation: str) -> Any:
    class_name, options = CONFIGS["qwen3_moe"]
    model = build("qwen3_moe", getattr(transformers, class_name)(**options), torch.bfloat16)
    use_our_experts(model, implementation)
    return next(module for module in model.modules() if takes_registry(module))


@pytest.mark.parametrize("implementation", list(KERNELS))
@torch.no_grad()
def test_only_live_choices_are_computed_and_in_their_order(implementation: str) -> None:
    experts = one_layer(implementation)
    assert kernel_of(experts) is KERNELS[implementation]
    hidden = torch.randn(6, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    choices = torch.tensor([[7, 8, 1], [8, 8, 0], [3, 0, 8], [8, 7, 8], [2, 2, 5], [8, 4, 7]])
    live = [(t, e) for t, row in enumerate(choices.tolist()) for e in row if e < 8]
    out, places = choice_outputs(experts, hidden, choices.int(), kernel_of(experts), len(live))
    assert len(out) == len(live) == 11
    for row, (t, e) in zip(out[places], live, strict=True):
        inner = experts._apply_gate(torch.nn.functional.linear(hidden[t], experts.gate_up_proj[e]))
        expected = torch.nn.functional.linear(inner, experts.down_proj[e])
        torch.testing.assert_close(row, expected, rtol=2e-2, atol=2e-2)


def test_experts_that_quantizers_cannot_look_into_are_refused() -> None:
    experts = one_layer("eager")
    assert kernel_of(experts) is looped_linear
    experts.config._experts_implementation = "grouped_mm"
    with pytest.raises(AssertionError, match="'grouped_mm', which knows no quantizers"):
        kernel_of(experts)
