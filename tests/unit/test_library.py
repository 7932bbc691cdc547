"""Quantizers on any torch module: which modules get them, what they compute, and that nothing loses them."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
import transformers
from small_nets import INT8, INT8_WITH_NORMS, images, loop, resnet18
from torch import nn
from torch.utils.checkpoint import checkpoint

import hf_ptq
from hf_ptq.errors import RunError, UserError
from hf_ptq.quantization.modules import KINDS, kind_of

FP8 = {"rules": [{"pattern": "*", "weight": "fp8", "input": "fp8"}]}
ROUNDED = "20 BatchNorm: input int8"
CASES = {
    "Linear": (lambda: nn.Linear(6, 5), (3, 6), -1, 0),
    "Conv1D": (lambda: transformers.Conv1D(5, 6), (3, 6), -1, 1),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 9), 1, 0),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 5, 5), 1, 0),
    "Conv3d": (lambda: nn.Conv3d(4, 6, 2), (2, 4, 3, 3, 3), 1, 0),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 6, 3), (2, 4, 9), 1, 1),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 6, 3), (2, 4, 5, 5), 1, 1),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(4, 6, 2), (2, 4, 3, 3, 3), 1, 1),
    "LayerNorm": (lambda: nn.LayerNorm(6), (3, 6), -1, None),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), (5, 4), 1, None),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), (2, 4, 5, 5), 1, None),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(4), (2, 4, 3, 3, 3), 1, None),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(4), (2, 4, 5, 5), 1, None),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), (2, 4, 5, 5), 1, None),
}
FORMATS = [  # of input and weight
    ("int8", "int8_per_channel"),
    ("int8_per_channel", "int8"),
    ("fp8", "fp8_per_channel"),
    ("fp8_per_channel", "fp8"),
    (None, "int8_per_channel"),
    ("int8", None),
    (None, None),
]
POOLS = ["AvgPool1d", "AvgPool2d", "AvgPool3d", "MaxPool1d", "MaxPool2d", "MaxPool3d"]
ADAPTIVE = ["AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d", "AdaptiveMaxPool2d"]


def drawn(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def rounded(values: torch.Tensor, number_format: str | None, dim: int) -> torch.Tensor:
    """In float64, from the formats' definitions: scale = amax / largest code, per tensor or along `dim`."""
    exact = values.detach().double()
    if number_format is None:
        return exact
    amax = exact.abs().amax()
    if number_format.endswith("per_channel"):
        amax = exact.abs().amax([d for d in range(exact.dim()) if d != dim % exact.dim()], keepdim=True)
    if number_format.startswith("int8"):
        scale = amax / 127
        return (exact / scale).round().clamp(-128, 127) * scale
    scale = amax / 448
    quotient = exact / scale
    step = 2.0 ** (quotient.abs().clamp(min=2.0**-6).log2().floor() - 3)  # E4M3: three bits of mantissa
    return (quotient / step).round() * step * scale


def reference(module: nn.Module, x: torch.Tensor, input_format, weight_format, dims) -> torch.Tensor:
    """The module's own forward in float64 on rounded tensors."""
    double = copy.deepcopy(module).double()
    if dims[1] is not None:
        double.weight.data = rounded(module.weight, weight_format, dims[1])
    return double(rounded(x, input_format, dims[0]))


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_fake_quantization(name, formats):
    make, shape, *dims = CASES[name]
    torch.manual_seed(1)
    module, x = make().eval(), drawn(shape)
    input_format, weight_format = formats
    rule = {role: fmt for role, fmt in (("input", input_format), ("weight", weight_format)) if fmt}
    exact, expected = (reference(module, x, *pair, dims) for pair in ((None, None), formats))
    if rule and (input_format or dims[1] is not None):
        hf_ptq.quantize(module, {"rules": [{"pattern": "*", **rule}]}, loop(x))
    torch.testing.assert_close(module(x).double(), expected, rtol=2e-5, atol=2e-6)
    if dims[1] is not None and weight_format:
        assert (module(x).double() - exact).abs().max() > 1e-4


@pytest.mark.parametrize("name", [*POOLS, *ADAPTIVE])
def test_pools_round_their_input(name):
    dims = int(name[-2])
    x = drawn((2, 3, *[6] * dims))
    pool = getattr(nn, name)(2)
    expected = pool(rounded(x, "int8", 1))
    hf_ptq.quantize(pool, {"rules": [{"pattern": "*", "input": "int8"}]}, loop(x))
    torch.testing.assert_close(pool(x).double(), expected)


def test_embedding_rows():
    table, ids = nn.Embedding(7, 6), torch.tensor([0, 3, 6])
    expected = rounded(table.weight, "int8_per_channel", 0)[ids]
    hf_ptq.quantize(table, INT8 | {"rules": INT8["rules"][:1]})
    torch.testing.assert_close(table(ids).double(), expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers(kind):
    torch.manual_seed(0)
    layer, x = kind(4, 8, 2), drawn((5, 2, 4))
    double = copy.deepcopy(layer).double()
    for leaf, parameter in double._parameters.items():
        if leaf.startswith("weight"):
            parameter.data = rounded(layer._parameters[leaf], "int8_per_channel", 0)
    expected = double(rounded(x, "int8", -1))[0]
    hf_ptq.quantize(layer, INT8, loop(x))
    out = layer(x)[0]
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    out.sum().backward()
    assert layer._flat_weights[0] is layer.weight_ih_l0
    assert float(layer.weight_hh_l1.grad.abs().sum()) > 0
    packed = nn.utils.rnn.pack_sequence([x[:, 0], x[:3, 1]])
    assert torch.isfinite(layer(packed)[0].data).all()


@pytest.mark.parametrize("name", ["Linear", "Conv2d", "BatchNorm2d", "SyncBatchNorm"])
@pytest.mark.parametrize("granularity", ["", "_per_channel"])
def test_gradients_are_the_slopes_of_a_long_way(name, granularity):
    """Over a step of many codes the mean slope of the rounded function is what the estimator gives; outside it is 0."""
    make, shape, *_ = CASES[name]
    torch.manual_seed(2)
    module, x = make().eval(), drawn(shape).clamp(-2, 2)
    rule = {"weight": f"int8{granularity}", "input": f"int8{granularity}"}
    hf_ptq.quantize(module, {"rules": [{"pattern": "*", **rule}]}, loop(3 * torch.ones_like(x)))
    direction = torch.randn(module(x).shape, generator=torch.Generator().manual_seed(5))
    leaf = x.clone().requires_grad_()
    (module(leaf) * direction).sum().backward()
    step = 20 * 3 / 127  # a whole number of codes
    flat = x.flatten()
    for index in range(0, flat.numel(), max(1, flat.numel() // 12)):
        ends = []
        for sign in (1, -1):
            moved = flat.clone()
            moved[index] += sign * step
            ends.append(float((module(moved.view(shape)) * direction).sum().detach()))
        slope = (ends[0] - ends[1]) / (2 * step)
        assert float(leaf.grad.flatten()[index]) == pytest.approx(slope, rel=2e-3, abs=2e-3)
    outside = torch.full_like(x, 3.5).requires_grad_()
    module(outside).sum().backward()
    assert float(outside.grad.abs().sum()) == 0


def test_gradients_that_pass():
    linear, x = nn.Linear(4, 4), drawn((3, 4))
    hf_ptq.quantize(linear, FP8, loop(x), clips_gradients=False)
    far = (100 * x).requires_grad_()
    linear(far).sum().backward()
    assert float(far.grad.abs().min()) > 0


def test_learned_ranges_follow_their_slope():
    """d(rounded)/d(amax), inside and outside, as the paper gives it; the optimizer moves the range."""
    linear = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        linear.weight.fill_(1.0)
    hf_ptq.quantize(linear, {"rules": [{"pattern": "*", "input": "int8"}]}, loop(torch.tensor([[2.0]])))
    (amax,) = hf_ptq.learn_ranges(linear)
    linear(torch.tensor([[5.0]])).sum().backward()
    assert float(amax.grad) == 1
    amax.grad = None
    x = 0.7
    linear(torch.tensor([[x]])).sum().backward()
    scale = 2 / 127
    assert float(amax.grad) == pytest.approx((round(x / scale) * scale - x) / 2, abs=1e-6)
    torch.optim.SGD([amax], lr=1.0).step()
    assert float(hf_ptq.quantizers(linear)["input_quantizer"].amax) != 2
    assert hf_ptq.quantizer_state(linear)["quantizers"]["input_quantizer"]["learned"]


# --- the same modules, whatever was done to the model ------------------------------------------------


def test_every_batch_norm_has_a_quantizer_that_is_off():
    model = hf_ptq.quantize(resnet18(), INT8, loop(images()))
    lines = hf_ptq.summary(model).splitlines()
    assert lines == [
        "1 AdaptiveAvgPool: input int8 (off)",
        "20 BatchNorm: input int8 (off)",
        "20 Conv: input int8, weight int8_per_channel",
        "1 Linear: input int8, weight int8_per_channel",
    ]
    assert len(hf_ptq.enable(model, "*bn*")) == 16
    with pytest.raises(RunError, match=r"stages\.0\.0\.bn1\.input_quantizer: its input has no range yet"):
        model(images())
    hf_ptq.calibrate(model, loop(images()))
    assert "16 BatchNorm: input int8" in hf_ptq.summary(model).splitlines()


def test_conversion_keeps_quantizers_and_their_work():
    x = images()
    model = hf_ptq.quantize(resnet18(), INT8_WITH_NORMS, loop(x))
    before, summary, names = model(x), hf_ptq.summary(model), list(hf_ptq.quantizers(model))
    assert ROUNDED in summary
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert sum(isinstance(m, nn.SyncBatchNorm) for m in converted.modules()) == 20
    torch.testing.assert_close(converted(x), before, rtol=0, atol=1e-6)
    assert (hf_ptq.summary(converted), list(hf_ptq.quantizers(converted))) == (summary, names)
    hf_ptq.disable(converted, "*bn1")
    assert (converted(x) - before).abs().max() > 1e-4, "they were at work"
    other = nn.SyncBatchNorm.convert_sync_batchnorm(resnet18())
    hf_ptq.quantize(other, INT8_WITH_NORMS, loop(x))
    assert (hf_ptq.summary(other), list(hf_ptq.quantizers(other))) == (summary, names)


def test_without_its_entry_nothing_is_lost_in_silence(monkeypatch):
    model = hf_ptq.quantize(resnet18(), INT8_WITH_NORMS, loop(images()))
    monkeypatch.delitem(KINDS, nn.SyncBatchNorm)
    assert kind_of(nn.SyncBatchNorm(4)) is None
    with pytest.raises(RunError, match="a SyncBatchNorm holds a quantizer, and is no kind"):
        nn.SyncBatchNorm.convert_sync_batchnorm(model)


def test_a_module_that_was_replaced_is_missed():
    model = hf_ptq.quantize(resnet18(), INT8, loop(images()))
    model.stem[0] = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
    model.head = nn.Linear(64, 10)
    for look in (hf_ptq.summary, hf_ptq.quantizer_state, hf_ptq.quantizers, hf_ptq.calibrate):
        with pytest.raises(RunError, match=r"have been replaced by ones that hold no quantizer: stem\.0, head"):
            look(model)


def test_a_module_of_ones_own():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor([[1.0, 0.3], [0.2, 0.11]]))

        def forward(self, x):
            return x @ self.gain

    recipe = {"rules": [{"pattern": "*", "weight": "int8"}]}
    with pytest.raises(UserError, match="quantizes nothing in Scaled"):
        hf_ptq.quantize(Scaled(), recipe)
    with pytest.raises(UserError, match="no class of modules"):
        hf_ptq.register(3)
    try:
        hf_ptq.register(Scaled, weights=("gain",))

        class Finer(Scaled):
            pass

        model = hf_ptq.quantize(Finer(), recipe)
        torch.testing.assert_close(model(torch.eye(2)).double(), rounded(model.gain, "int8", 0))
        assert model.gain is model._parameters["gain"]
    finally:
        KINDS.pop(Scaled, None)


def test_copies_and_files_of_a_model():
    x = images()
    model = hf_ptq.quantize(resnet18(), INT8, loop(x))
    expected = model(x)
    twin = copy.deepcopy(model)
    hf_ptq.disable(model, "*")
    torch.testing.assert_close(twin(x), expected, rtol=0, atol=0)
    file = io.BytesIO()
    torch.save(twin, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), expected)


def test_checkpointed_activations_give_the_same_gradients():
    x, models = images(), [hf_ptq.quantize(resnet18(), INT8, loop(images())) for _ in range(3)]
    models[0](x).square().sum().backward()
    for model, reentrant in ((models[1], False), (models[2], True)):
        y = x.clone().requires_grad_()
        for stage in (model.stem, *model.stages):
            y = checkpoint(stage, y, use_reentrant=reentrant)
        model.head(model.pool(y).flatten(1)).square().sum().backward()
        for one, other in zip(models[0].parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        assert not any("weight" in vars(module) for module in model.modules()), "no rounded weight is left behind"


def test_an_error_in_a_forward_leaves_the_weights_in_place():
    linear = hf_ptq.quantize(nn.Linear(4, 4), FP8, loop(drawn((2, 4))))
    with pytest.raises(RuntimeError):
        linear(torch.ones(2, 5))
    assert isinstance(linear.weight, nn.Parameter)
    assert "weight" not in vars(linear)


def test_the_same_buffer_with_new_numbers_is_rounded_anew():
    linear, x = nn.Linear(4, 4), drawn((2, 4))
    hf_ptq.quantize(linear, FP8, loop(x))
    with torch.no_grad():
        first = linear(x)
        x.mul_(0.5)
        assert not torch.equal(linear(x), first)


@pytest.mark.parametrize("recipe", [INT8, FP8])
def test_compiled_without_a_break(recipe):
    block, x = resnet18().stages[1][0], drawn((2, 8, 6, 6))
    hf_ptq.quantize(block, recipe, loop(x))
    torch._dynamo.reset()
    assert torch._dynamo.explain(block)(x).graph_break_count == 0
    for training in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        with torch.set_grad_enabled(training):
            torch.testing.assert_close(compiled(x), block(x), rtol=0, atol=1e-6)
    assert hf_ptq.summary(compiled) == hf_ptq.summary(block)


# --- what is refused -----------------------------------------------------------------------------------


def test_refusals_leave_the_model_as_it_was():
    model, x = resnet18(), images()
    with pytest.raises(UserError, match="there is no data to measure them"):
        hf_ptq.quantize(model, INT8)
    with pytest.raises(UserError, match="unknown format 'int9'"):
        hf_ptq.quantize(model, {"rules": [{"pattern": "*", "weight": "int9"}]})
    with pytest.raises(
        RunError, match=r"21 modules were never called in calibration.*: stem\.0, stages\.\*\.\*\.conv1 \(8\), "
    ):
        hf_ptq.quantize(model, INT8, lambda m: None)
    with pytest.raises(UserError, match="is not quantized"):
        hf_ptq.quantizer_state(model)
    assert hf_ptq.quantizers(model) == {}
    assert hf_ptq.summary(model) == "not quantized"
    assert not any(m._forward_pre_hooks for m in model.modules())
    hf_ptq.quantize(model, INT8, loop(x))
    with pytest.raises(UserError, match="matches no quantizer"):
        hf_ptq.disable(model, "nosuch")


def test_what_a_format_cannot_take_is_told():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        net = nn.Sequential(nn.Linear(32, 20), nn.Linear(20, 16), nn.Conv1d(2, 2, 16))
        hf_ptq.quantize(net, {"rules": [{"pattern": "*", "weight": "nvfp4"}]})
    assert [str(w.message) for w in told] == [
        "1 is left unquantized: 20 inputs are no multiple of 16",
        "2 is left unquantized: nvfp4 needs weights [out, in], a Conv has others",
    ]
    assert hf_ptq.summary(net) == "1 Linear: weight nvfp4"
    three = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 32), nn.Linear(32, 20))
    with pytest.warns(UserWarning, match=r"2 modules \(0 \.\.\.\) are left unquantized: 20 inputs are no") as found:
        hf_ptq.quantize(three, {"rules": [{"pattern": "*", "weight": "nvfp4"}]})
    assert len(found) == 1, "one for each kind and reason"


def test_mixed_precision_trains():
    model, x = hf_ptq.quantize(resnet18(), INT8, loop(images())), images()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()
    exact = model(x).square().mean()
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=0.05)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
