"""Number formats against float64 references, on random and adversarial values, as stacks and as single matrices."""

from __future__ import annotations

import pytest
import torch
from decoding import E3M2, GRIDS, codes_of, step_of

from hf_ptq.quantization.formats import codecs, encode
from hf_ptq.quantization.formats.description import FORMATS
from hf_ptq.quantization.formats.fp8 import E4M3_MAX, to_e4m3
from hf_ptq.quantization.formats.int4 import pack_rows, unpack_rows
from hf_ptq.quantization.formats.mx import (
    e3m2_codes,
    e3m2_values,
    e8m0_of,
    pack_sixes,
    power_of,
    unpack_sixes,
)
from hf_ptq.quantization.formats.nvfp4 import block_scale, e2m1_codes, pack_nibbles, rotated, unpack_e2m1
from hf_ptq.quantization.formats.ranges import Ranges, block_amax, from_tiles, parts, tiles, weight_amax

WEIGHT_FORMATS = [name for name, fmt in FORMATS.items() if "weight" in fmt.roles]


def adversarial(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """[8, 128] weights that have gone wrong somewhere in the field."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(8, 128, generator=generator)
    outlier = normal * 1e-2
    outlier[3, 5] = 1e4
    zero_rows = normal.clone()
    zero_rows[2] = 0
    zero_rows[4, 16:32] = 0
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(8, 16) * 448
    values = {
        "normal": normal,
        "heavy": torch.randn(8, 128, generator=generator) ** 5,
        "outlier": outlier,
        "zero": torch.zeros(8, 128),
        "zero rows": zero_rows,
        "equal": torch.full((8, 128), -0.37),
        "ties": ties,
        "largest": torch.full((8, 128), 3e38),
        "tiny": normal * 1e-30,
        "negative zero": torch.full((8, 128), -0.0),
    }
    return {name: value.to(dtype) for name, value in values.items()}


def tensors_of(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return codecs()[name].encode(weight, weight_amax(weight, FORMATS[name]))


# --- references in float64 -----------------------------------------------------------------------

FLT_MAX = torch.finfo(torch.float32).max
LARGEST = {"e4m3": 448.0, "e2m1": 6.0, "e3m2": 28.0, "int8": 127.0, "int4": 7.0}


def largest_of_parts(name: str, weight: torch.Tensor) -> torch.Tensor:
    """max |w| of each element's part, by a loop that knows nothing of the code's reshaping."""
    fmt, size = FORMATS[name], weight.abs().double()
    if fmt.granularity == "tensor":
        return size.max().expand(size.shape)
    if fmt.granularity == "channel":
        return size.max(1, keepdim=True).values.expand(size.shape)
    out = torch.zeros_like(size)
    for i in range(0, size.shape[0], fmt.block_rows):
        for j in range(0, size.shape[1], fmt.input_multiple):
            place = (slice(i, i + fmt.block_rows), slice(j, j + fmt.input_multiple))
            out[place] = size[place].max()
    return out


def exact_step(name: str, weight: torch.Tensor) -> torch.Tensor:
    """The step by the formula in the format's docstring, float64, without the rounding of an E4M3 scale."""
    fmt, amax = FORMATS[name], largest_of_parts(name, weight)
    if fmt.scale == "e8m0":
        top = torch.tensor(127 / 64 if name == "mxint8" else LARGEST[fmt.element]).double()
        power = torch.exp2(torch.ceil(torch.log2(amax / top)).clamp(-127, float(torch.log2(FLT_MAX / top).floor())))
        return torch.where(amax == 0, 2.0**-127, power) / (64 if name == "mxint8" else 1)
    step = amax / LARGEST[fmt.element]
    if fmt.scale == "e4m3":
        ceiling = {"nvfp4_four_over_six": 256.0, "nvfp4_block32_fp8": 448 / 6}.get(name, 448.0)
        top = weight.abs().double().max() / (6 * ceiling)
        top = top if top > 0 else torch.ones(()).double()
        return torch.where(amax == 0, top, (step / top).clamp(2**-9, 448) * top)
    return torch.where(amax == 0, 1.0, step)


def nearest(grid: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Distance from each value to the nearest entry of a sorted grid, float64."""
    above = torch.searchsorted(grid, values).clamp(1, len(grid) - 1)
    return torch.minimum((grid[above] - values).abs(), (grid[above - 1] - values).abs())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", list(adversarial(torch.float32)))
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_scales_are_the_formulas_and_codes_the_nearest_ones(name: str, case: str, dtype: torch.dtype) -> None:
    weight = adversarial(dtype)[case]
    tensors = tensors_of(name, weight)
    fmt, step = FORMATS[name], step_of(name, tensors, weight.shape)
    expected = exact_step(name, weight)
    tolerance = 1 / 16 if fmt.scale == "e4m3" else 0 if fmt.scale == "e8m0" else 1e-6
    smallest = 2**-9 * tensors["weight_scale_2"].double() if fmt.scale == "e4m3" else 0  # the step of small scales
    allowed = torch.maximum(tolerance * expected, torch.as_tensor(smallest / 2)) + 2**-150
    assert ((step - expected).abs() <= allowed * (1 + 1e-6)).all(), case
    exact = (weight.double() / step).clamp(GRIDS[fmt.element][0], GRIDS[fmt.element][-1])
    exact = exact.clamp(-127, 127) if name == "mxint8" else exact
    codes = codes_of(name, tensors)
    assert ((codes - exact).abs() <= nearest(GRIDS[fmt.element], exact) + 1e-6 * exact.abs()).all()
    scales = [t for n, t in tensors.items() if n != "weight"]
    positive = [t for t in scales if t.dtype != torch.uint8]
    assert all(bool((s.float() > 0).all() and s.float().isfinite().all()) for s in positive)
    assert all(bool((s != 255).all()) for s in scales if s.dtype == torch.uint8)
    decoded = codecs()[name].decode(tensors)
    assert torch.allclose(decoded.double(), codes * step, rtol=1e-6, atol=1e-44)


@pytest.mark.parametrize("case", list(adversarial(torch.float32)))
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_rounding_twice_is_rounding_once(name: str, case: str) -> None:
    weight = adversarial(torch.float32)[case]
    amax = weight_amax(weight, FORMATS[name])
    codec = codecs()[name]
    once = codec.decode(codec.encode(weight, amax))
    assert torch.equal(codec.decode(codec.encode(once, amax)), once)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("size", [1e-44, 1e-42, 1e-40, 1e-38])
def test_denormal_weights_give_finite_scales_and_values(name: str, size: float) -> None:
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(3)) * size
    tensors = tensors_of(name, weight)
    scales = [t.float() for n, t in tensors.items() if n != "weight" and t.dtype != torch.uint8]
    assert all(bool((s > 0).all() and s.isfinite().all()) for s in scales)
    decoded = codecs()[name].decode(tensors)
    assert decoded.isfinite().all()
    assert decoded.abs().max() <= 2 * weight.abs().max()


@pytest.mark.parametrize("name", [n for n in WEIGHT_FORMATS if codecs()[n].encode_blocks is not None])
def test_blocks_with_chosen_ranges(name: str) -> None:
    """Their own ranges give what encode gives; rounding is decoding, with any; and twice is once."""
    codec, size = codecs()[name], FORMATS[name].input_multiple
    generator = torch.Generator().manual_seed(7)
    for weight in adversarial(torch.bfloat16).values():
        amax, own = weight_amax(weight, FORMATS[name]), block_amax(weight, size)
        assert codec.encode_blocks is not None
        plain, chosen = codec.encode(weight, amax), codec.encode_blocks(weight, amax, own)
        assert all(torch.equal(plain[n].float(), chosen[n].float()) for n in plain)
        ranges = own * torch.empty_like(own).uniform_(0.01, 1.0, generator=generator)
        once = codec.decode(codec.encode_blocks(weight, amax, ranges))
        assert torch.equal(codec.round_blocks(weight, amax, ranges), once)
        assert torch.equal(codec.decode(codec.encode_blocks(once, amax, ranges)), once)


def test_four_over_six_maps_the_largest_block_to_four() -> None:
    weight = torch.full((1, 16), 6.0)
    codec = codecs()["nvfp4_four_over_six"]
    assert codec.encode_blocks is not None
    tensors = codec.encode_blocks(weight, torch.tensor(6.0), torch.tensor([[9.0]]))
    assert tensors["weight_scale"].float().tolist() == [[384.0]]
    assert tensors["weight"].unique().tolist() == [0x66]  # code 6 is the value 4
    assert codec.decode(tensors).unique().tolist() == pytest.approx([6.0])


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_a_stack_is_its_matrices(name: str) -> None:
    stack = torch.stack(list(adversarial(torch.bfloat16).values()))
    amax = weight_amax(stack, FORMATS[name])
    codec = codecs()[name]
    whole = codec.encode(stack, amax)
    for i, matrix in enumerate(stack):
        alone = codec.encode(matrix, amax[i])
        assert all(torch.equal(whole[local][i].float(), alone[local].float()) for local in alone)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("shape", [(8, 256), (3, 130, 128), (0, 128)])
def test_layout_is_what_encode_gives(name: str, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    if 0 in shape:
        assert all(0 in size for _, size in [codecs()[name].layout(shape)["weight"]])
        return
    tensors = tensors_of(name, weight)
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


# --- arithmetic of single formats, by hand --------------------------------------------------------


def test_int4_rows_share_bytes() -> None:
    codes = torch.tensor([[7.0, -8.0], [-1.0, 3.0], [0.0, 1.0], [2.0, -2.0]])
    assert pack_rows(codes).tolist() == [[0xF7, 0x38], [0x20, 0xE1]]
    assert torch.equal(unpack_rows(pack_rows(codes)).float(), codes)


def test_int4_with_fp8_has_the_scale_of_the_group() -> None:
    weight = torch.randn(4, 256)
    tensors = codecs()["int4_block128_fp8"].encode(weight, torch.tensor(896.0))
    plain = tensors_of("int4_block128", weight)
    assert tensors["weight_scale_2"].item() == 2.0
    assert all(torch.equal(tensors[name], plain[name]) for name in plain)


def test_mx_scales_are_the_smallest_powers_that_hold_the_block() -> None:
    amax = torch.tensor([0.0, 6.0, 6.0001, 12.0, 3.0, 1e-45, 3.4e38])
    assert e8m0_of(amax, 6.0).tolist() == [0, 127, 128, 128, 126, 0, 252]
    for byte in range(255):
        power = power_of(torch.tensor(byte, dtype=torch.uint8))
        assert power.double() == 2.0 ** (byte - 127)


def test_e3m2_codes_are_the_nearest_and_ties_even() -> None:
    values = torch.tensor([0.0, 0.03125, 0.0625, 0.09375, 0.25, 0.28125, 28.0, 30.0, -1.0, 15.0])
    assert e3m2_codes(values).tolist() == [0, 0, 1, 2, 4, 4, 31, 31, 32 + 12, 28]
    every = torch.arange(64, dtype=torch.uint8)
    decoded = e3m2_values(every)
    assert torch.equal(decoded[:32].double(), E3M2)
    assert torch.equal(e3m2_codes(decoded) % 32, every % 32)
    assert torch.equal(unpack_sixes(pack_sixes(every)), every.int())
    assert pack_sixes(torch.tensor([1, 2, 3, 63], dtype=torch.uint8)).tolist() == [0x81, 0x30, 0xFC]


def test_tiles_at_the_edges_are_smaller() -> None:
    weight = torch.randn(2, 200, 300)
    cut = tiles(weight, 128, 128)
    assert cut.shape == (2, 2, 3, 128, 128)
    assert torch.equal(cut[1, 1, 2, :72, :44], weight[1, 128:, 256:])
    assert torch.equal(from_tiles(cut, weight.shape), weight)
    tensors = tensors_of("fp8_2d", weight)
    assert tensors["weight_scale"].shape == (2, 2, 1, 3, 1)
    assert tensors["weight_scale"][1, 1, 0, 2, 0] == weight[1, 128:, 256:].abs().max() / 448
    assert (codecs()["fp8_2d"].decode(tensors) - weight).norm() < 0.03 * weight.norm()


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("shape", [(300, 256), (3, 300, 256)])
def test_parts_are_the_whole(name: str, shape: tuple[int, ...]) -> None:
    """Cut at multiples of `row_step`, the parts of a weight are encoded as the whole is."""
    fmt, weight = FORMATS[name], torch.randn(shape) ** 3
    ranges = Ranges(weight_amax(weight, fmt))
    whole = codecs()[name].decode(encode(fmt, weight, ranges))
    for elements in (1, 256 * 128, 256 * 300 * 2, 10**9):
        pieces = list(parts(shape, elements, fmt.row_step))
        assert sum(weight[index].numel() for index in pieces) == weight.numel()
        for index in pieces:
            decoded = codecs()[name].decode(encode(fmt, weight[index], ranges.of_part(fmt, index)))
            assert torch.equal(decoded, whole[index])


def test_a_rotation_is_its_own_inverse_and_spreads_an_outlier() -> None:
    for size in (64, 96, 7):
        values = torch.randn(5, size, dtype=torch.float32)
        assert torch.allclose(rotated(rotated(values)), values, atol=1e-5)
        assert torch.allclose(rotated(values).norm(dim=-1), values.norm(dim=-1), rtol=1e-5)
    outlier = torch.zeros(1, 64)
    outlier[0, 3] = 8.0
    assert rotated(outlier).abs().unique().tolist() == [1.0]
    block = rotated(torch.eye(96))
    assert block[:32, 32:].abs().max() == 0  # 96 = 3 * 32


@pytest.mark.parametrize("case", list(adversarial(torch.float32)))
@pytest.mark.parametrize("name", ["mxfp4", "mxfp6", "mxfp8", "mxint8"])
def test_rounded_mx_activations_are_decoded_codes(name: str, case: str) -> None:
    values = adversarial(torch.bfloat16)[case]
    expected = codecs()[name].decode(tensors_of(name, values)).to(values.dtype)
    assert torch.equal(codecs()[name].fake_quantize(values, torch.tensor(0.0)), expected)


def test_int8_activations() -> None:
    values = torch.tensor([[1.0, -2.0, 0.5, 127.0], [0.1, 0.4, 0.6, 254.0]])
    static = codecs()["int8"]
    assert static.fake_quantize(values, torch.tensor(127.0)).tolist() == [[1, -2, 0, 127], [0, 0, 1, 127]]
    assert static.input_scale(torch.tensor(254.0)) == 2.0
    token = codecs()["int8_per_token"].fake_quantize(values, torch.tensor(0.0))
    assert token.tolist() == [[1, -2, 0, 127], [0, 0, 0, 254]]
