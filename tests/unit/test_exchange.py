"""Which row of an exchange of tokens goes where: against plain loops over ranks, tokens and choices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tiny import CONFIGS, build

from hf_ptq.model.exchange import count_rows, places_of_returned, rows_to_send
from hf_ptq.model.experts import KERNELS, choice_outputs, kernel_of, looped_linear, takes_registry, use_our_experts

TOKENS, K, LOCAL, RANKS = st.integers(0, 9), st.integers(1, 4), st.integers(1, 3), st.integers(2, 4)


@given(TOKENS, K, LOCAL, RANKS, st.integers(0, 2**32))
def test_each_token_goes_once_to_each_rank_that_it_needs(tokens: int, k: int, local: int, ranks: int, seed: int):
    index = torch.randint(0, local * ranks, (tokens, k), generator=torch.Generator().manual_seed(seed))
    needed, counts = count_rows(index, local, ranks)
    token, choices = rows_to_send(index, needed, local, int(needed.sum()))
    sent, returned, expected_counts = [], [], []
    for rank in range(ranks):
        here = range(rank * local, (rank + 1) * local)
        mine = [(t, row) for t, row in enumerate(index.tolist()) if any(e in here for e in row)]
        sent += [(t, [e - here.start if e in here else local for e in row]) for t, row in mine]
        pairs = [t * k + slot for t, row in mine for slot, e in enumerate(row) if e in here]
        returned += pairs
        expected_counts.append([len(mine), len(pairs)])
    assert counts.tolist() == expected_counts
    assert list(zip(token.tolist(), choices.tolist(), strict=True)) == sent
    assert choices.dtype == torch.int32
    back = torch.tensor(returned, dtype=torch.int64)  # as if the output of a choice were its number
    assert back[places_of_returned(index, local)].tolist() == list(range(tokens * k))


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
