"""Data through a model, and models by a plan."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import hf_ptq
from hf_ptq.data.loader import evaluating
from hf_ptq.distributed.plan import Plan
from hf_ptq.distributed.process_group import DistributedState
from hf_ptq.errors import RunError, UserError


def test_batches_of_every_shape_reach_the_model():
    seen = []

    class Net(nn.Module):
        def forward(self, x, y=None):
            seen.append((x.tolist(), None if y is None else y.tolist(), torch.is_grad_enabled()))

    x, y = torch.ones(1), torch.zeros(1)
    hf_ptq.calibration_loop(Net(), [x, (x, y), {"x": x, "y": y}])
    assert seen == [([1], None, False), ([1], [0], False), ([1], [0], False)]


def test_a_forward_of_ones_own_gets_the_loaders_mapping_or_a_new_one(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny("llama"))
    batch = {"input_ids": torch.tensor([[5, 6]]), "name": "kept"}
    given = []

    def forward(mapping):
        given.append(mapping)
        assert model.config.use_cache is False
        assert model(mapping["input_ids"]).past_key_values is None

    before = model.config.use_cache
    hf_ptq.calibration_loop(model, [batch], forward=forward)
    hf_ptq.calibration_loop(model, [batch], device="cpu", forward=forward)
    assert given[0] is batch
    assert given[1] is not batch
    assert given[1].keys() == batch.keys()
    assert model.config.use_cache == before
    with pytest.raises(KeyError):
        hf_ptq.calibration_loop(model, [{}], forward=forward)
    assert model.config.use_cache == before, "also after an error"


def test_modes_come_back_module_by_module():
    net = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)).train()
    net[1].eval()
    with evaluating(net):
        assert not any(m.training for m in net.modules())
    assert [m.training for m in net.modules()] == [True, True, False]


def test_a_plan_that_shards_needs_a_group(tiny, monkeypatch):
    plan = Plan("expert-parallel", "cpu", 0, (), world_size=2, ep_degree=2)
    with pytest.raises(UserError, match="the plan is expert-parallel over 2 ranks, but no process group is set up"):
        hf_ptq.load(tiny("qwen3_moe"), plan)
    monkeypatch.setenv("HF_PTQ_EP_DEGREE", "2")
    with pytest.raises(UserError, match="HF_PTQ_EP_DEGREE=2 from the environment, but no process group is set up"):
        hf_ptq.load(tiny("qwen3_moe"), Plan("single", "cpu", 0, ()))
    monkeypatch.delenv("HF_PTQ_EP_DEGREE")
    alone = DistributedState(0, 1, torch.device("cpu"))
    with pytest.raises(UserError, match="does not divide"):
        hf_ptq.decide_plan(tiny("qwen3_moe"), alone, ep_degree=2)
    model = hf_ptq.load(tiny("qwen3_moe"), hf_ptq.decide_plan(tiny("qwen3_moe"), alone))
    expected = AutoModelForCausalLM.from_pretrained(tiny("qwen3_moe"))
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=2e-2, atol=2e-2)
    assert not any(p.requires_grad for p in model.parameters())


def test_the_package_is_light_and_names_what_it_has():
    code = (
        "import sys, hf_ptq; assert 'torch' not in sys.modules; "
        "[getattr(hf_ptq, name) for name in dir(hf_ptq) if not name.startswith('_')]; "
        "import hf_ptq.export.tensors; assert callable(hf_ptq.export) and hf_ptq.export.tensors"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert hf_ptq.quantize.__module__ == "hf_ptq.library"
    assert hf_ptq.quantize_checkpoint.__module__ == "hf_ptq.run"


def test_modules_that_share_a_quantizer_are_all_named_where_they_were_never_called(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny("llama"))
    with pytest.raises(RunError) as caught:
        hf_ptq.quantize(model, "fp8", lambda m: None)
    (problem,) = caught.value.problems
    kinds = [f"self_attn.{leaf}_proj" for leaf in "qkvo"] + [f"mlp.{leaf}_proj" for leaf in ("gate", "up", "down")]
    assert "21 modules were never called" in problem.what
    assert all(f"model.layers.*.{kind} (3)" in problem.what for kind in kinds)
    assert all(f'"model.layers.*.{kind}"' in problem.cure for kind in kinds)
