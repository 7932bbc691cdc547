"""Odd models, data and states: each works, or is refused with what, where and how to cure it."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from transformers import ViTConfig, ViTForImageClassification

import hf_ptq

WEIGHTS = {"rules": [{"pattern": "*", "weight": "int8_per_channel"}]}
BOTH = {"rules": [{"pattern": "*", "weight": "int8_per_channel", "input": "int8"}]}
Pair = namedtuple("Pair", "first second")


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))


def test_tokens_of_a_vision_model_are_no_experts():
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8))
    hf_ptq.quantize(model, "int8_weight_only")
    assert "Linear: weight int8_per_channel" in hf_ptq.summary(model)


def test_what_means_nothing_is_told():
    typo = {"rules": [*WEIGHTS["rules"], {"pattern": "*", "parent_class": "Liner", "enable": False}]}
    with pytest.warns(UserWarning, match=r"pattern '\* in Liner' matches no module"):
        hf_ptq.quantize(net(), typo)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_batches_that_are_tuples_with_names(device):
    seen = []

    class Net(nn.Module):
        def forward(self, *given):
            seen.append(given)

    packed = pack_sequence([drawn(5, 4), drawn(3, 4)])
    hf_ptq.calibration_loop(Net(), [Pair(1, drawn(2)), packed], device)
    assert seen[0][0] == 1
    assert [type(value) for value in seen[1]] == [type(packed)]
    hf_ptq.calibration_loop(Net(), [Pair(1, 2)], device, forward=seen.append)
    assert seen[2].second == 2
