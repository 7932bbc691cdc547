"""Odd models, data and states: each works, or is refused with what, where and how to cure it."""

from __future__ import annotations

import contextlib
import warnings
from collections import namedtuple

import numpy as np
import pytest
import torch
from small_nets import loop
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pack_sequence
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

import hf_ptq
from hf_ptq.errors import RunError, UserError
from hf_ptq.quantization.modules import KINDS

WEIGHTS = {"rules": [{"pattern": "*", "weight": "int8_per_channel"}]}
BOTH = {"rules": [{"pattern": "*", "weight": "int8_per_channel", "input": "int8"}]}
Pair = namedtuple("Pair", "first second")


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))


@pytest.fixture
def model():
    return hf_ptq.quantize(net(), BOTH, loop(drawn(4, 32)))


# --- models ------------------------------------------------------------------------------------------


def test_a_weight_that_attention_reads_by_itself_is_not_counted():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    with pytest.warns(UserWarning, match=r"out_proj is left unquantized: attention reads its weight and never calls"):
        hf_ptq.quantize(layer, BOTH, loop(drawn(2, 3, 16)))
    assert hf_ptq.summary(layer).splitlines()[1:] == ["2 Linear: input int8, weight int8_per_channel"]


@pytest.mark.parametrize("change", ["weight_norm", "parametrized", "pruned", "recurrent"])
def test_weights_that_are_computed_are_told(change):
    changed = {
        "weight_norm": lambda: nn.utils.weight_norm(nn.Linear(8, 8)),
        "parametrized": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
        "pruned": lambda: prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5),
        "recurrent": lambda: parametrizations.weight_norm(nn.LSTM(8, 8), "weight_ih_l0"),
    }[change]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with pytest.raises(UserError, match=r"no parameter of its own is a weight.*; quantize before"):
            hf_ptq.quantize(nn.Sequential(changed()), BOTH, loop(drawn(2, 8)))


def test_a_weight_that_was_parametrized_since_is_missed(model):
    parametrizations.weight_norm(model[0])
    for look in (hf_ptq.summary, hf_ptq.quantizer_state, lambda m: m(drawn(2, 32))):
        with pytest.raises(RunError, match="rounds the parameter 'weight' of a ParametrizedLinear, which has none"):
            look(model)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: nn.LazyLinear(8), "its weight has no shape yet"),
        (lambda: nn.Linear(8, 0), "its weight is empty"),
        (
            lambda: nn.Linear(8, 8).requires_grad_(False).to(torch.float8_e4m3fn),
            r"its weight is of torch.float8_e4m3fn",
        ),
    ],
)
def test_weights_without_numbers_to_round(layer, reason):
    with pytest.warns(UserWarning, match=f"0 is left unquantized: {reason}"):
        model = hf_ptq.quantize(nn.Sequential(layer(), nn.Linear(8, 8)), WEIGHTS)
    assert hf_ptq.summary(model) == "1 Linear: weight int8_per_channel"


def test_a_child_of_the_same_name_is_not_overwritten():
    linear = nn.Linear(8, 8)
    linear.input_quantizer = nn.Identity()
    with pytest.raises(UserError, match="it has a child input_quantizer of its own"):
        hf_ptq.quantize(linear, BOTH, loop(drawn(2, 8)))
    assert isinstance(linear.input_quantizer, nn.Identity)


def test_projections_of_a_recurrent_layer():
    layer = hf_ptq.quantize(nn.LSTM(4, 8, proj_size=3), BOTH, loop(drawn(5, 2, 4)))
    assert "weight_hr_l0_quantizer" in hf_ptq.quantizers(layer)


def test_a_module_under_two_names_is_saved_under_both():
    def make():
        torch.manual_seed(0)
        shared = nn.Linear(4, 4)
        return nn.Sequential(shared, nn.ReLU(), shared)

    model, x = hf_ptq.quantize(make(), BOTH, loop(drawn(2, 4))), drawn(2, 4)
    other = make()
    other.load_state_dict(hf_ptq.model_state(model), strict=True)
    assert torch.equal(hf_ptq.restore_quantizers(other, hf_ptq.quantizer_state(model))(x), model(x))


def test_a_module_that_cannot_take_its_format_cannot_be_switched_on():
    rules = [{"pattern": "*", "weight": "nvfp4"}, {"pattern": "1", "enable": False}]
    model = hf_ptq.quantize(nn.Sequential(nn.Linear(32, 20), nn.Linear(20, 16)), {"rules": rules})
    with pytest.raises(UserError, match="'1' matches no quantizer"):
        hf_ptq.enable(model, "1")


def test_models_without_weights_in_memory(model):
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    with pytest.raises(UserError, match=r"4 tensors of the model are on the meta device, such as 0\.weight"):
        hf_ptq.quantize(other, WEIGHTS)
    hf_ptq.restore_quantizers(other, hf_ptq.quantizer_state(model)).to_empty(device="cpu")
    other.load_state_dict(hf_ptq.model_state(model))
    assert torch.equal(other(drawn(2, 32)), model(drawn(2, 32)))


def test_tokens_of_a_vision_model_are_no_experts():
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8))
    hf_ptq.quantize(model, "int8_weight_only")
    assert "Linear: weight int8_per_channel" in hf_ptq.summary(model)


def test_quantized_anew_where_modules_were_replaced(model):
    state = hf_ptq.quantizer_state(model)
    for again in (
        lambda: hf_ptq.quantize(model, BOTH, loop(drawn(4, 32))),
        lambda: hf_ptq.restore_quantizers(model, state),
    ):
        model[0] = nn.Linear(32, 32)
        again()
        assert hf_ptq.summary(model) == "2 Linear: input int8, weight int8_per_channel"


def test_a_part_that_was_quantized_by_itself(model):
    hf_ptq.quantize(model[2], {"rules": [{"pattern": "*", "weight": "fp8", "input": "fp8"}]}, loop(drawn(4, 32)))
    with pytest.raises(RunError, match=r"2\.\w+ has another format than the model was quantized with"):
        hf_ptq.quantizer_state(model)
    hf_ptq.quantize(model, BOTH, loop(drawn(4, 32)))
    with pytest.raises(UserError, match="this Linear is not quantized"):
        hf_ptq.quantizer_state(model[2])


def test_compiled_and_run_before_it_was_quantized():
    torch._dynamo.reset()
    compiled, x = torch.compile(net(), backend="eager"), drawn(2, 32)
    with torch.no_grad():
        before = compiled(x)
        for recipe in (WEIGHTS, {"rules": [{"pattern": "*", "weight": "fp8"}]}):
            hf_ptq.quantize(compiled, recipe)
            assert torch.equal(compiled(x), compiled._orig_mod(x))
            assert not torch.equal(compiled(x), before)


# --- recipes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["mse", {"method": "mse", "fp8_scale_sweep": True}])
def test_ranges_are_searched_in_any_model(algorithm):
    """By the same search as for a transformers model: the error is lower than that of the largest magnitude."""
    weight = "int8_per_channel" if algorithm == "mse" else "nvfp4_static"
    errors = []
    for chosen in ("max", algorithm):
        linear, exact = net()[0], net()[0].weight
        hf_ptq.quantize(linear, {"rules": [{"pattern": "*", "weight": weight}], "algorithm": chosen})
        errors.append(float((linear.weight_quantizer(linear.weight) - exact).detach().square().sum()))
    assert errors[1] < 0.97 * errors[0]


def test_what_means_nothing_is_told():
    with pytest.raises(UserError, match="kv_cache_qformat='fp8': a Sequential is no transformers model"):
        hf_ptq.quantize(net(), WEIGHTS, kv_cache_qformat="fp8")
    typo = {"rules": [*WEIGHTS["rules"], {"pattern": "*", "parent_class": "Liner", "enable": False}]}
    with pytest.warns(UserWarning, match="no module is of the class 'Liner'"):
        hf_ptq.quantize(net(), typo)
    apart = {"rules": [*WEIGHTS["rules"], {"pattern": "0", "parent_class": "ReLU", "enable": False}]}
    with pytest.warns(UserWarning, match="no module that '0' matches is of the class ReLU"):
        hf_ptq.quantize(net(), apart)


# --- data -----------------------------------------------------------------------------------------------


def test_a_loader_in_place_of_a_loop(model):
    for call in (lambda loader: hf_ptq.quantize(net(), BOTH, loader), lambda loader: hf_ptq.calibrate(model, loader)):
        with pytest.raises(UserError, match=r"(?s)forward_loop is a list.*hf_ptq.calibration_loop\(model, loader\)"):
            call([drawn(2, 32)])


def test_a_calibration_that_fails_changes_nothing(model):
    expected, state = model(drawn(2, 32)), hf_ptq.quantizer_state(model)

    def stopping(m):
        m(9 * drawn(2, 32))
        raise ValueError("midway")

    for fails in (stopping, loop(drawn(2, 32) * float("nan")), lambda m: None, lambda m: m(drawn(2, 5))):
        with pytest.raises((ValueError, RunError, RuntimeError)):
            hf_ptq.calibrate(model, fails)
        assert torch.equal(model(drawn(2, 32)), expected)
        after = hf_ptq.quantizer_state(model)["ranges"]
        assert all(torch.equal(after[name], amax) for name, amax in state["ranges"].items())


@pytest.mark.parametrize("number_format", ["int8_per_channel", "mxfp4", "nvfp4"])
def test_weights_that_are_not_finite(number_format):
    model = net()
    with torch.no_grad():
        model[2].weight[3, 3] = torch.inf
    with pytest.raises(RunError, match=r"^2\.weight holds NaN or infinity"):
        hf_ptq.quantize(model, {"rules": [{"pattern": "*", "weight": number_format}]})
    assert hf_ptq.summary(model) == "not quantized"


def test_batches_without_rows(model):
    before = hf_ptq.quantizer_state(model)["ranges"]
    hf_ptq.calibrate(model, loop(drawn(0, 32), drawn(4, 32)))
    after = hf_ptq.quantizer_state(model)["ranges"]
    assert all(torch.equal(after[name], amax) for name, amax in before.items())
    assert model(drawn(0, 32)).shape == (0, 16)
    with pytest.raises(RunError, match=r"2 modules were never called in calibration.*: \* \(2\)"):
        hf_ptq.calibrate(model, loop(drawn(0, 32)))


def test_a_buffer_that_others_write_to(model):
    """Memory of numpy's does not count its changes."""
    memory = np.ones((2, 32), dtype=np.float32)
    x = torch.from_numpy(memory)
    with torch.no_grad():
        first = model(x).clone()
        memory *= -1
        assert torch.equal(model(x), model(x.clone()))
        assert not torch.equal(model(x), first)

    def growing(m):
        for factor in (1, 3):
            memory[:] = factor
            m(x)

    hf_ptq.calibrate(model, growing)
    assert float(hf_ptq.quantizers(model)["0.input_quantizer"].amax) == 3


def test_inputs_that_are_no_numbers_to_round():
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(drawn(1000, 8))

        def forward(self, ids):
            return self.weight[ids]

    hf_ptq.register(Rows)
    try:
        ids = torch.tensor([1, 500, 999])
        with pytest.raises(RunError, match=r"(?s)was given a tensor of torch.int64.*channel_dim=None"):
            hf_ptq.quantize(Rows(), BOTH, loop(ids))
        hf_ptq.register(Rows, channel_dim=None)
        assert hf_ptq.summary(hf_ptq.quantize(Rows(), BOTH)) == "1 Rows: weight int8_per_channel"
    finally:
        KINDS.pop(Rows)


def test_an_input_by_its_own_name():
    class Named(nn.Linear):
        def forward(self, hidden, scale=1.0):
            return scale * nn.functional.linear(hidden, self.weight, self.bias)

    linear, x = Named(8, 8), drawn(2, 8)
    hf_ptq.quantize(linear, BOTH, lambda m: m(scale=1.0, hidden=x))
    assert torch.equal(linear(scale=1.0, hidden=x), linear(x))
    assert float(linear.input_quantizer.amax) == float(x.abs().max())
    with pytest.raises(RunError, match="called without 'hidden'"):
        linear(scale=1.0)


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


# --- states ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thing", ["state.safetensors", None, ({}, {}), 3])
def test_things_that_are_no_state(thing):
    with pytest.raises(UserError, match=r"(?s)this is no state of quantizers, but a.*hf_ptq\.read_state"):
        hf_ptq.restore_quantizers(net(), thing)


@pytest.mark.parametrize("version", [0, -1, "1", None, 1.5])
def test_versions_that_there_are_not(model, version):
    with pytest.raises(UserError, match=f"the state has version {version!r}, versions are whole numbers"):
        hf_ptq.restore_quantizers(net(), {**hf_ptq.quantizer_state(model), "version": version})


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (
            lambda s: s["ranges"]["0.weight_quantizer"].fill_(float("nan")),
            "'0.weight_quantizer' holds negative numbers",
        ),
        (lambda s: s["ranges"]["0.input_quantizer"].fill_(-1), "'0.input_quantizer' holds negative numbers"),
        (lambda s: s["ranges"].update({"0.input_quantizer": 3.0}), "is no tensor of floating-point numbers, but 3.0"),
        (lambda s: s["ranges"].update({"7": torch.ones(())}), "'7' belongs to no quantizer of the state"),
        (
            lambda s: s["ranges"].update({"2.weight_quantizer": torch.ones(3)}),
            r"shape \[3\] in the state, .* needs \[16\]",
        ),
        (lambda s: s["quantizers"]["2.input_quantizer"].pop("enabled"), "2.input_quantizer: enabled: Field required"),
        (lambda s: s["quantizers"]["2.input_quantizer"].update(enabled="no"), "2.input_quantizer: enabled: .* boolean"),
        (lambda s: s.update(quantizers=[]), "quantizers of the state is a list"),
        (lambda s: s["recipe"].update(rules=[{"pattern": "*"}]), "a rule gives a format"),
    ],
)
def test_states_that_were_edited(model, spoil, told):
    state = hf_ptq.quantizer_state(model)
    spoil(state)
    other = net()
    with pytest.raises(UserError, match=told):
        hf_ptq.restore_quantizers(other, state)
    assert hf_ptq.summary(other) == "not quantized"


@pytest.mark.parametrize("number_format", ["fp8", "nvfp4", "mxfp4", "int4_block128"])
def test_weights_of_other_sizes(number_format):
    recipe = {"rules": [{"pattern": "*", "weight": number_format}]}
    state = hf_ptq.quantizer_state(hf_ptq.quantize(nn.Linear(256, 128), recipe))
    with pytest.raises(UserError, match=r"is of a weight \[128, 256\] in the state, of one \[256, 384\] in the model"):
        hf_ptq.restore_quantizers(nn.Linear(384, 256), state)
    del state["quantizers"]["weight_quantizer"]["shape"]  # as states were before they told it
    hf_ptq.restore_quantizers(nn.Linear(256, 128), state)


def test_ranges_that_the_state_lacks_are_not_the_models_own(model):
    state = hf_ptq.quantizer_state(model)
    del state["ranges"]["0.input_quantizer"]
    other = hf_ptq.restore_quantizers(hf_ptq.quantize(net(), BOTH, loop(9 * drawn(4, 32))), state)
    with pytest.raises(RunError, match=r"0\.input_quantizer: its input has no range yet"):
        other(drawn(2, 32))


@pytest.mark.parametrize("kv", ["fp8_affine", "nvfp4_affine", "nvfp4"])
def test_the_cache_comes_back(kv):
    def make():
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64}
        return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()

    ids = torch.arange(24).view(2, 12)
    model = hf_ptq.quantize(make(), "fp8", lambda m: hf_ptq.calibration_loop(m, [ids]), kv_cache_qformat=kv)
    other = hf_ptq.restore_quantizers(make(), hf_ptq.quantizer_state(model))
    assert torch.equal(other(ids).logits, model(ids).logits)
    expected = model(ids).logits.detach()
    with contextlib.suppress(RunError):
        hf_ptq.calibrate(model, lambda m: None)
    assert torch.equal(model(ids).logits, expected)
    if kv == "nvfp4":  # apart, as after a move to another device
        for quantizer in hf_ptq.quantizers(model).values():
            quantizer.amax = None if quantizer.amax is None else quantizer.amax.clone()
        learned = hf_ptq.learn_ranges(model, "*weight_quantizer")
        assert len(learned) == 4, "qkv, o, gate and up, down"
        assert all(
            one is other for one, other in zip(learned, hf_ptq.learn_ranges(model, "*weight_quantizer"), strict=True)
        )
        model = hf_ptq.quantize(make(), "w4a16_nvfp4")
        (learned,) = hf_ptq.learn_ranges(model, "*q_proj*")
        found = hf_ptq.quantizers(model)
        assert all(found[f"model.layers.0.self_attn.{leaf}_proj.weight_quantizer"].amax is learned for leaf in "qkv")
