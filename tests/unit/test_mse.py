"""The search for ranges by squared error: against a brute-force reference, and never worse than max calibration."""

from __future__ import annotations

import pytest
import torch

from hf_ptq.model.views import WeightView
from hf_ptq.planning import _idle_algorithm
from hf_ptq.quantization.algorithm import Max, Mse, read_algorithm
from hf_ptq.quantization.algorithms import ALGORITHMS, mse
from hf_ptq.quantization.assignment import Assignment, QuantizedWeight
from hf_ptq.quantization.formats import codecs, encode
from hf_ptq.quantization.formats.description import FORMATS
from hf_ptq.quantization.formats.nvfp4 import E2M1_MAX, global_scale
from hf_ptq.quantization.formats.ranges import Ranges, block_amax
from hf_ptq.quantization.ranges import weight_ranges
from hf_ptq.quantization.recipe import Recipe

WEIGHT_FORMATS = [name for name, fmt in FORMATS.items() if "weight" in fmt.roles]
SEARCHED = [name for name in WEIGHT_FORMATS if not FORMATS[name].is_dynamic]
PLAIN, SWEEP = Mse(), Mse(fp8_scale_sweep=True)


def heavy(*shape: int, seed: int = 0) -> torch.Tensor:
    """Heavy-tailed weights, with blocks of zeros and of equal values."""
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) ** 3
    weight[..., 0, :32] = 0
    weight[..., 1, :64] = 0.25
    return weight.bfloat16()


def quantized(module: str, name: str, shape: tuple[int, int], group: str = "", experts: int = 0) -> QuantizedWeight:
    modules = tuple(f"e.{e}.{module}" for e in range(experts)) if experts else (module,)
    return QuantizedWeight(
        WeightView(modules, module, shape, 0, bool(experts)), FORMATS[name], None, group or module, "*"
    )


def search(spec: Mse, weights: dict[QuantizedWeight, torch.Tensor]) -> dict[QuantizedWeight, Ranges]:
    return ALGORITHMS["mse"].weight_ranges(spec, weights)


def rounded(name: str, weight: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    return codecs()[name].decode(encode(FORMATS[name], weight, ranges))


def error(name: str, weight: torch.Tensor, ranges: Ranges) -> float:
    return float((rounded(name, weight, ranges).double() - weight.double()).square().sum())


@pytest.mark.parametrize("spec", [PLAIN, SWEEP, Mse(start_multiplier=1.0, stop_multiplier=1.5, step_size=0.5)])
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("shape", [(144, 256), (3, 16, 128)])
def test_the_error_is_never_above_that_of_max(name: str, spec: Mse, shape: tuple[int, ...]) -> None:
    weight = heavy(*shape)
    q = quantized("m", name, shape[-2:], experts=3 if len(shape) == 3 else 0)
    plain, found = weight_ranges({q: weight})[q], search(spec, {q: weight})[q]
    parts = [slice(None)] if len(shape) == 2 else list(range(3))
    for part in parts:
        least, most = (
            float((rounded(name, weight, r)[part].double() - weight[part].double()).square().sum())
            for r in (found, plain)
        )
        assert least <= most
    if spec is PLAIN and not FORMATS[name].is_dynamic:
        assert error(name, weight, found) < error(name, weight, plain)
    if spec is SWEEP:  # touches NVFP4 with chosen block scales and nothing else
        touched = name in ("nvfp4_static", "nvfp4_four_over_six")
        assert (error(name, weight, found) < error(name, weight, plain)) == touched


@pytest.mark.parametrize("name", ["int4_block32", "int8_per_channel", "nvfp4_static"])
def test_the_plain_search_is_that_of_its_definition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part by part, whatever the parts, against all candidates at once in float64."""
    monkeypatch.setattr(mse, "CPU_PART_ELEMENTS", 2 * 128 + 1)
    weight, fmt = heavy(14, 128), FORMATS[name]
    q = quantized("m", name, (14, 128))
    found, most = search(PLAIN, {q: weight})[q], weight_ranges({q: weight})[q]
    size = fmt.block_size or 128
    own = block_amax(weight, size)
    multipliers = [1.0, *torch.linspace(0.25, 4.0, 39, dtype=torch.float64).tolist()]
    assert PLAIN.multipliers == pytest.approx(multipliers[1:])
    errors = []
    for multiplier in multipliers:
        blocks = own * multiplier
        at = Ranges(most.amax, blocks) if fmt.has_chosen_blocks else Ranges(blocks if fmt.block_size else blocks[:, 0])
        squares = (rounded(name, weight, at).double() - weight.double()).square()
        errors.append(squares.unflatten(-1, (-1, size)).sum(-1))
    best = torch.stack(errors).amin(0)
    squares = (rounded(name, weight, found).double() - weight.double()).square()
    assert torch.allclose(squares.unflatten(-1, (-1, size)).sum(-1), best, rtol=1e-5, atol=1e-12)


def telling_blocks(*shape: int) -> torch.Tensor:
    """Blocks of two values and an outlier, of sizes down to the smallest scales: the best scale may be far."""
    generator = torch.Generator().manual_seed(5)
    blocks = torch.rand(shape[0] * shape[1] // 16, 2, generator=generator) * 6
    which = torch.randint(0, 2, (len(blocks), 16), generator=generator)
    weight = blocks.gather(1, which)
    weight[:, 0] = 6.0
    return (weight * torch.exp2(-torch.rand(len(blocks), 1, generator=generator) * 20)).reshape(shape)


@pytest.mark.parametrize("name", ["nvfp4_static", "nvfp4_four_over_six"])
def test_the_sweep_finds_the_best_of_all_126_scales(name: str) -> None:
    weight = torch.cat([heavy(32, 128), telling_blocks(480, 128)])
    q = quantized("m", name, (512, 128))
    found = search(SWEEP, {q: weight})[q]
    scale_2 = global_scale(found.amax, 256.0 if name.endswith("six") else 448.0)
    codes = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    blocks = block_amax(weight, 16)
    errors = []
    for scale in codes:
        at = Ranges(found.amax, torch.full_like(blocks, float(scale)) * (E2M1_MAX * scale_2))
        squares = (rounded(name, weight, at).double() - weight.double()).square()
        errors.append(squares.unflatten(-1, (-1, 16)).sum(-1))
    least = torch.stack(errors).amin(0)
    squares = (rounded(name, weight, found).double() - weight.double()).square()
    assert torch.allclose(squares.unflatten(-1, (-1, 16)).sum(-1), least, rtol=1e-6, atol=0)
    assert (encode(FORMATS[name], weight, found)["weight_scale"].float()[0, :2] == 1.0).all()  # zeros keep theirs


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "nvfp4_block32_fp8"])
def test_a_group_has_one_range_the_best_for_all(name: str) -> None:
    weights = {
        quantized("q", name, (8, 128), "qkv"): heavy(8, 128),
        quantized("k", name, (4, 128), "qkv"): heavy(4, 128, seed=1) * 3,
        quantized("o", name, (4, 128)): heavy(4, 128, seed=2),
    }
    found, most = search(PLAIN, weights), weight_ranges(weights)
    first, second, alone = found.values()
    assert torch.equal(first.amax, second.amax)
    assert not torch.equal(first.amax, alone.amax)
    members = list(weights.items())[:2]
    top = most[members[0][0]].amax

    def total(amax: torch.Tensor) -> float:
        return sum(error(name, tensor, Ranges(amax)) for _, tensor in members)

    best = min([top, *(top * m for m in PLAIN.multipliers)], key=total)
    assert torch.equal(first.amax, best)


def test_experts_are_searched_one_by_one() -> None:
    stack = torch.stack([heavy(8, 128, seed=seed) for seed in range(3)])
    for name in SEARCHED:
        whole = search(PLAIN, {(q := quantized("m", name, (8, 128), experts=3)): stack})[q]
        for i, matrix in enumerate(stack):
            alone = search(PLAIN, {(q := quantized("m", name, (8, 128))): matrix})[q]
            assert torch.equal(whole.amax[i], alone.amax)
            if alone.block_amax is not None:
                assert whole.block_amax is not None
                assert torch.equal(whole.block_amax[i], alone.block_amax)


def test_the_search_needs_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more rounded values at a time than a part has, whatever the number of candidates."""
    most = 0
    original = mse._squares

    def spy(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        nonlocal most
        most = max(most, values.numel())
        return original(values, weight)

    monkeypatch.setattr(mse, "_squares", spy)
    monkeypatch.setattr(mse, "CPU_PART_ELEMENTS", 1024)
    search(SWEEP, {(q := quantized("m", "nvfp4_static", (64, 128))): heavy(64, 128)})
    search(PLAIN, {(q := quantized("m", "int4_block128", (64, 128))): heavy(64, 128)})
    assert most == 1024
    assert q.weight.name == "int4_block128"


@pytest.mark.parametrize(
    ("spec", "passed_over"),
    [
        (PLAIN, {"mxfp4", "mxfp8", "mxfp6", "mxint8"}),
        (SWEEP, {"mxfp4", "mxfp8", "mxfp6", "mxint8", "fp8", "nvfp4", "nvfp4_block32", "int8_per_channel", "fp8_2d"}),
    ],
)
def test_formats_that_have_no_range_to_choose(spec: Mse, passed_over: set[str]) -> None:
    """What is said to be passed over is as by max calibration; what is not has another range somewhere."""
    names = ("mxfp4", "mxfp8", "mxfp6", "mxint8", "fp8", "nvfp4", "nvfp4_block32", "int8_per_channel", "fp8_2d")
    assert {n for n in names if ALGORITHMS["mse"].passes_over(spec, FORMATS[n])} == passed_over
    for name in (*names, "nvfp4_static"):
        weights = {quantized("m", name, (128, 128)): heavy(128, 128)}
        (chosen,), (plain,) = search(spec, weights).values(), ALGORITHMS["max"].weight_ranges(Max(), weights).values()
        same = torch.equal(chosen.amax, plain.amax) and chosen.block_amax is None
        assert same == (name in passed_over), name


@pytest.mark.parametrize(
    ("spec", "names", "idle"),
    [
        (PLAIN, ("mxfp8",), "the algorithm mse as set has no range to choose for weights in mxfp8: they are as by max"),
        (SWEEP, ("nvfp4", "fp8"), "for weights in fp8, nvfp4"),
        (SWEEP, ("nvfp4_static", "fp8"), None),
        (PLAIN, ("mxfp8", "fp8"), None),
        (Max(), ("mxfp8",), None),
    ],
)
def test_an_algorithm_that_changes_nothing_is_told(spec: Mse | Max, names: tuple[str, ...], idle: str | None) -> None:
    found = tuple(quantized(f"m{i}", name, (128, 128)) for i, name in enumerate(names))
    told = _idle_algorithm(Recipe("mine", "", (), spec), Assignment(found, (), None, ()))
    assert [idle in line for line in told] == ([True] if idle else [])


# ---- what a recipe says


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("mse", Mse()),
        ({"method": "mse", "fp8_scale_sweep": True}, SWEEP),
        (["max", {"method": "mse", "step_size": 0.5}], Mse(step_size=0.5)),
    ],
)
def test_an_algorithm_is_a_name_an_object_or_a_list(value: object, meant: Mse) -> None:
    assert read_algorithm(value) == meant
    assert read_algorithm(None).method == read_algorithm("max").method == read_algorithm([]).method == "max"


def test_multipliers_include_both_ends() -> None:
    assert Mse(start_multiplier=1.0, stop_multiplier=1.5, step_size=0.5).multipliers == [1.0, 1.5]
    assert Mse(start_multiplier=2.0, stop_multiplier=2.0).multipliers == [2.0]
    assert len(Mse().multipliers) == 39


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("min", "there is no algorithm 'min'; known are max, mse"),
        ("awq_lite", "'awq_lite' is not built yet .AWQ is missing.; use one of max, mse"),
        ({"fp8_scale_sweep": True}, "its name under `method`"),
        ({"method": "mse", "step": 1}, "step: Extra inputs are not permitted"),
        ({"method": "mse", "step_size": 0}, "step_size: Input should be greater than 0"),
        ({"method": "mse", "stop_multiplier": 0.1}, "stop_multiplier is below start_multiplier"),
        ({"method": "mse", "stop_multiplier": float("inf")}, "stop_multiplier: Input should be a finite number"),
        ({"method": "mse", "step_size": 1e-7}, "step_size makes more than 1000 candidates"),
        (3, "give the name of an algorithm"),
    ],
)
def test_what_is_no_algorithm_is_named(value: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_algorithm(value)
