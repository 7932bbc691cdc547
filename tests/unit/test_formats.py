"""Number formats against float64 references, on random and adversarial values, as stacks and as single matrices."""

from __future__ import annotations

import pytest
import torch

from hf_ptq.quantization.formats import codecs
from hf_ptq.quantization.formats.description import FORMATS
from hf_ptq.quantization.formats.fp8 import E4M3_MAX, to_e4m3
from hf_ptq.quantization.formats.nvfp4 import block_scale, e2m1_codes, pack_nibbles, unpack_e2m1

WEIGHT_FORMATS = [name for name, fmt in FORMATS.items() if "weight" in fmt.roles]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
E4M3 = E4M3[E4M3.isfinite()].unique()


def adversarial(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """[8, 64] weights that have gone wrong somewhere in the field."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(8, 64, generator=generator)
    outlier = normal * 1e-2
    outlier[3, 5] = 1e4
    zero_rows = normal.clone()
    zero_rows[2] = 0
    zero_rows[4, 16:32] = 0
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(8, 8) * 448
    values = {
        "normal": normal,
        "heavy": torch.randn(8, 64, generator=generator) ** 5,
        "outlier": outlier,
        "zero": torch.zeros(8, 64),
        "zero rows": zero_rows,
        "equal": torch.full((8, 64), -0.37),
        "ties": ties,
        "largest": torch.full((8, 64), 3e38),
        "tiny": normal * 1e-30,
        "negative zero": torch.full((8, 64), -0.0),
    }
    return {name: value.to(dtype) for name, value in values.items()}


def amax_of(name: str, weight: torch.Tensor) -> torch.Tensor:
    rows = weight.abs().amax(-1).float()
    return rows.amax(-1) if FORMATS[name].is_shared else rows


def nearest(grid: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Distance from each value to the nearest entry of a sorted grid, float64."""
    above = torch.searchsorted(grid, values).clamp(1, len(grid) - 1)
    return torch.minimum((grid[above] - values).abs(), (grid[above - 1] - values).abs())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", list(adversarial(torch.float32)))
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_codes_are_the_nearest_ones(name: str, case: str, dtype: torch.dtype) -> None:
    weight = adversarial(dtype)[case]
    tensors = codecs()[name].encode(weight, amax_of(name, weight))
    step = tensors["weight_scale"].double()
    if name == "nvfp4":
        step = (step * tensors["weight_scale_2"].double()).repeat_interleave(16, -1)
        codes, grid = unpack_e2m1(tensors["weight"]).double(), torch.cat([-E2M1.flip(0), E2M1]).unique()
    else:
        step = step[:, None] if step.dim() else step
        codes = tensors["weight"].double()
        grid = E4M3 if FORMATS[name].element == "e4m3" else torch.arange(-128, 128, dtype=torch.float64)
    exact = (weight.double() / step).clamp(grid[0], grid[-1])
    assert ((codes - exact).abs() <= nearest(grid, exact) + 1e-6 * exact.abs()).all()
    scales = [t for n, t in tensors.items() if n != "weight"]
    assert all(bool((s.float() > 0).all() and s.float().isfinite().all()) for s in scales)


@pytest.mark.parametrize("case", list(adversarial(torch.float32)))
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_rounding_twice_is_rounding_once(name: str, case: str) -> None:
    weight = adversarial(torch.float32)[case]
    amax = amax_of(name, weight)
    codec = codecs()[name]
    once = codec.decode(codec.encode(weight, amax))
    assert torch.equal(codec.decode(codec.encode(once, amax)), once)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_a_stack_is_its_matrices(name: str) -> None:
    stack = torch.stack(list(adversarial(torch.bfloat16).values()))
    amax = amax_of(name, stack)
    codec = codecs()[name]
    whole = codec.encode(stack, amax)
    for i, matrix in enumerate(stack):
        alone = codec.encode(matrix, amax[i])
        assert all(torch.equal(whole[local][i].float(), alone[local].float()) for local in alone)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("shape", [(8, 64), (3, 8, 64)])
def test_layout_is_what_encode_gives(name: str, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    tensors = codecs()[name].encode(weight, amax_of(name, weight))
    assert codecs()[name].layout(shape) == {local: (t.dtype, tuple(t.shape)) for local, t in tensors.items()}


def test_e2m1_ties_go_to_the_even_code() -> None:
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0])
    assert e2m1_codes(values).tolist() == [0, 2, 2, 4, 4, 6, 6, 7]
    assert e2m1_codes(-values).tolist() == [8, 10, 10, 12, 12, 14, 14, 15]
    assert e2m1_codes(torch.tensor([0.0, -0.0, -1e-9])).tolist() == [0, 0, 8]


def test_even_index_is_in_the_low_nibble() -> None:
    assert pack_nibbles(torch.tensor([[7, 1]], dtype=torch.uint8)).tolist() == [[0x17]]
    assert unpack_e2m1(torch.tensor([[0x17, 0x8F]], dtype=torch.uint8)).tolist() == [[6.0, 0.5, -6.0, 0.0]]


def test_block_scales_never_vanish_or_overflow_before_the_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11 casts what is beyond 464 to NaN, 2.13 saturates: look at the values before the cast."""
    seen: list[torch.Tensor] = []

    def spy(values: torch.Tensor) -> torch.Tensor:
        seen.append(values)
        return to_e4m3(values)

    monkeypatch.setattr("hf_ptq.quantization.formats.nvfp4.to_e4m3", spy)
    amax = torch.tensor([0.0, 1e-30, 1.0, 60.0, 1e6])
    block_scale(amax, torch.tensor(60.0 / 2688))
    assert seen[0].tolist() == [1.0, 2**-9, pytest.approx(448 / 60), 448.0, 448.0]


def test_fp8_saturates_before_the_cast() -> None:
    assert to_e4m3(torch.tensor([449.0, -1e9, 464.0])).float().tolist() == [E4M3_MAX, -E4M3_MAX, E4M3_MAX]


def test_activations_are_rounded_as_servers_round() -> None:
    values = torch.tensor([[1.0, -2.0, 0.3, 448.0], [0.1, 0.2, 0.3, 900.0]])
    static = codecs()["fp8"].fake_quantize(values, torch.tensor(448.0))
    assert static.tolist() == [[1.0, -2.0, 0.3125, 448.0], [pytest.approx(0.1015625), 0.203125, 0.3125, 448.0]]
    token = codecs()["fp8_per_token"].fake_quantize(values, torch.tensor(0.0))
    scale = torch.tensor([448.0, 900.0])[:, None] / 448
    assert torch.equal(token, (values / scale).to(torch.float8_e4m3fn).float() * scale)
    assert codecs()["nvfp4"].fake_quantize(torch.full((1, 2, 16), 3.0), torch.tensor(2688.0)).unique().tolist() == [3.0]


@pytest.mark.parametrize("case", list(adversarial(torch.float32)))
@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_rounded_activations_are_decoded_codes(name: str, case: str) -> None:
    values = adversarial(torch.bfloat16)[case]
    for amax in (values.abs().max().float(), torch.tensor(0.5)):
        codec = codecs()[name]
        expected = codec.decode(codec.encode(values, amax)).to(values.dtype)
        assert torch.equal(codec.fake_quantize(values, amax), expected)
