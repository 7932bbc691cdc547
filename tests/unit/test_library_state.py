"""The state of quantizers: plain data, the same from every arrangement, and precise about what does not fit."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors import safe_open
from small_nets import INT8, Block, images, loop, resnet18
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers import AutoModelForCausalLM

import hf_ptq
from hf_ptq.errors import UserError


@pytest.fixture
def model():
    return hf_ptq.quantize(resnet18(), INT8, loop(images()))


def test_a_file_of_plain_data(model, tmp_path):
    state = hf_ptq.quantizer_state(model)
    torch.save(state, tmp_path / "state.pt")
    by_torch = torch.load(tmp_path / "state.pt", weights_only=True)
    hf_ptq.save_state(state, tmp_path / "state.safetensors")
    by_file = hf_ptq.read_state(tmp_path / "state.safetensors")
    with safe_open(tmp_path / "state.safetensors", "pt") as file:
        assert json.loads(file.metadata()["hf_ptq_state"])["version"] == 1
    expected = model(images())
    for read in (by_torch, by_file):
        assert {k: v for k, v in read.items() if k != "ranges"} == {k: v for k, v in state.items() if k != "ranges"}
        other = hf_ptq.restore_quantizers(resnet18(), read)
        assert torch.equal(other(images()), expected)
        again = hf_ptq.quantizer_state(other)
        assert again["quantizers"] == state["quantizers"]
        assert all(torch.equal(again["ranges"][name], amax) for name, amax in state["ranges"].items())


def test_files_that_are_none(model, tmp_path):
    (tmp_path / "text").write_text("text")
    with pytest.raises(UserError, match="is no file of quantizers"):
        hf_ptq.read_state(tmp_path / "text")
    hf_ptq.save_state(hf_ptq.quantizer_state(model), tmp_path / "state")
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, tmp_path / "tensors")
    with pytest.raises(UserError, match="holds tensors, but no state of quantizers"):
        hf_ptq.read_state(tmp_path / "tensors")
    with pytest.raises(UserError, match="this is no state of quantizers: it lacks version, recipe"):
        hf_ptq.restore_quantizers(resnet18(), {})


def arrangements(model: nn.Module) -> dict[str, nn.Module]:
    """The model in wrappers that need no group."""
    checkpointed, inner = copy.deepcopy(model), copy.deepcopy(model)
    apply_activation_checkpointing(checkpointed, check_fn=lambda m: isinstance(m, Block))
    inner.stages[1] = torch.compile(inner.stages[1], backend="eager")
    return {
        "compiled": torch.compile(copy.deepcopy(model), backend="eager"),
        "a stage compiled": inner,
        "checkpointed": checkpointed,
        "parallel": nn.DataParallel(copy.deepcopy(model)),
        "converted": nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model)),
    }


@pytest.mark.parametrize("name", ["compiled", "a stage compiled", "checkpointed", "parallel", "converted"])
def test_wrapped_before_or_after(model, name):
    expected, state = model(images()), hf_ptq.quantizer_state(model)
    after = arrangements(model)[name]
    before = hf_ptq.quantize(arrangements(resnet18())[name], INT8, loop(images()))
    for other in (after, before):
        own = hf_ptq.quantizer_state(other)
        assert own["quantizers"] == state["quantizers"]
        assert own["ranges"].keys() == state["ranges"].keys()
        assert hf_ptq.summary(other) == hf_ptq.summary(model)
        plain = resnet18()
        plain.load_state_dict(hf_ptq.model_state(other), strict=True)
        torch.testing.assert_close(hf_ptq.restore_quantizers(plain, own)(images()), expected, rtol=0, atol=1e-6)
    back = hf_ptq.restore_quantizers(arrangements(resnet18())[name], state)
    torch.testing.assert_close(back(images()), expected, rtol=0, atol=1e-6)


def test_everything_that_does_not_fit_is_told_at_once(model):
    state = hf_ptq.quantizer_state(model)
    other = resnet18()
    other.head = nn.Linear(64, 3)
    other.stages[3][1].conv2 = nn.Identity()
    other.extra = nn.Linear(2, 2)
    with pytest.raises(UserError) as told:
        hf_ptq.restore_quantizers(other, state)
    text = str(told.value)
    for line in (
        "the state has stages.3.1.conv2.input_quantizer, the model has no quantizer there",
        "the state has stages.3.1.conv2.weight_quantizer, the model has no quantizer there",
        "head.weight_quantizer is of a weight [10, 64] in the state, of one [3, 64] in the model",
        "the model has extra.weight_quantizer, the state knows nothing of it",
    ):
        assert line in text
    assert hf_ptq.quantizers(other) == {}, "the model is as it was"


def test_another_recipe_or_version(model):
    state = hf_ptq.quantizer_state(model)
    other = hf_ptq.quantize(resnet18(), {"name": "fp8", "rules": [{"pattern": "*", "weight": "fp8"}]})
    before = hf_ptq.quantizer_state(other)
    with pytest.raises(UserError) as told:
        hf_ptq.restore_quantizers(other, state)
    text = str(told.value)
    assert "the state's recipe int8 is not the model's, fp8: rules differ from number 1 on" in text
    assert "head.weight_quantizer has the format int8_per_channel in the state, fp8 in the model" in text
    assert "and 44 more of these" in text, "of the recipe, 21 formats and 42 inputs"
    assert hf_ptq.quantizer_state(other)["quantizers"] == before["quantizers"]
    with pytest.raises(UserError, match="the state has version 2, this hf-ptq reads up to 1"):
        hf_ptq.restore_quantizers(resnet18(), {**state, "version": 2})


def test_switches_and_learned_ranges_come_back(model):
    hf_ptq.disable(model, "head")
    learned = hf_ptq.learn_ranges(model, "stem.*")
    state = hf_ptq.quantizer_state(model)
    other = hf_ptq.restore_quantizers(resnet18(), state)
    found = hf_ptq.quantizers(other)
    assert not found["head.weight_quantizer"].is_enabled
    assert {name for name, q in found.items() if q.amax is not None and q.amax.requires_grad} == {
        "stem.0.input_quantizer",
        "stem.0.weight_quantizer",
    }
    assert len(learned) == 2
    assert torch.equal(other(images()), model(images()))


def test_the_ranges_of_a_fused_group_stay_one(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny("llama_wide"))
    hf_ptq.quantize(model, "w4a16_nvfp4")
    other = AutoModelForCausalLM.from_pretrained(tiny("llama_wide"))
    for quantized in (model, hf_ptq.restore_quantizers(other, hf_ptq.quantizer_state(model))):
        own = hf_ptq.quantizers(quantized)
        q, k, o = (own[f"model.layers.0.self_attn.{leaf}_proj.weight_quantizer"].amax for leaf in "qko")
        assert q is k
        assert q is not o
        weights = [quantized.model.layers[0].self_attn.get_parameter(f"{leaf}_proj.weight") for leaf in "qkv"]
        assert float(q) == max(float(w.detach().abs().max()) for w in weights)
    assert len(hf_ptq.learn_ranges(other)) == 2 * 4  # qkv, o, gate and up, down


def test_ranges_go_where_the_model_goes_and_stay_fp32(model):
    found = hf_ptq.quantizers(model)["head.weight_quantizer"]
    amax = found.amax.clone()
    model.to(torch.bfloat16)
    assert found.amax.dtype == torch.float32
    assert torch.equal(found.amax, amax)
    assert not any("quantizer" in name for name in (*model.state_dict(), *dict(model.named_parameters())))
