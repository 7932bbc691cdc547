"""What number formats there are: names and properties, without arithmetic and without torch.

A number format says how *one tensor* is stored or quantized: the element type, over which part of the tensor a
scale is shared, and of what type the scales are. Recipes name formats; `--list` and recipe validation read this
table without importing torch. The arithmetic of each entry is the codec of the same name in `formats/__init__.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["weight", "input", "kv"]
Element = Literal["e4m3", "e2m1", "e3m2", "int8", "int4"]
Granularity = Literal["tensor", "channel", "token", "block"]


@dataclass(frozen=True)
class NumberFormat:
    """One way to store a tensor.

    `granularity`: the part of the tensor that shares a scale: all of it, an output row (`channel`), a row of
    activations (`token`), or a block of `block_rows` rows and `block_size` consecutive inputs. `scale`: the type of
    these scales; `has_global_scale`: one more fp32 scale per tensor, shared by the members of a fused group.
    `packed_rows`: the rows whose codes share bytes. `is_dynamic`: scales are computed from the data at hand, so there
    is nothing to calibrate. `constant_amax`: the range is this number whatever the data. `has_bias`: the mean of each
    channel is taken off before rounding. `has_chosen_blocks`: the ranges of blocks under a global scale are an
    algorithm's to choose.
    """

    name: str
    element: Element
    granularity: Granularity
    roles: tuple[Role, ...]
    bits: float  # stored bits per element, block scales included
    description: str
    block_size: int | None = None
    block_rows: int = 1
    packed_rows: int = 1
    scale: Literal["fp32", "e4m3", "e8m0"] = "fp32"
    has_global_scale: bool = False
    is_dynamic: bool = False
    constant_amax: float | None = None
    has_bias: bool = False
    has_chosen_blocks: bool = False

    @property
    def input_multiple(self) -> int:
        """The number of inputs (last dimension) must be a multiple of this."""
        return self.block_size or 1

    @property
    def output_multiple(self) -> int:
        """The number of outputs (rows) must be a multiple of this."""
        return self.packed_rows

    @property
    def row_step(self) -> int:
        """A weight may be encoded in parts, cut between rows at multiples of this."""
        return max(self.block_rows, self.packed_rows)

    @property
    def is_shared(self) -> bool:
        """True where one amax serves a whole fused group."""
        return self.has_global_scale or self.granularity == "tensor"

    @property
    def needs_data(self) -> bool:
        """True where quantizing an activation needs a calibrated amax."""
        return not self.is_dynamic and self.constant_amax is None


def _int4(block_size: int) -> NumberFormat:
    return NumberFormat(
        f"int4_block{block_size}", "int4", "block", ("weight",), 4 + 32 / block_size,
        f"INT4, fp32 scale per {block_size} inputs", block_size=block_size, packed_rows=2,
    )  # fmt: skip


def _nvfp4(name: str, roles: tuple[Role, ...], description: str, block_size: int = 16, **more: bool) -> NumberFormat:
    return NumberFormat(
        name, "e2m1", "block", roles, 4 + 8 / block_size, description,
        block_size=block_size, scale="e4m3", has_global_scale=True, **more,
    )  # fmt: skip


def _mx(name: str, element: Element, bits: int) -> NumberFormat:
    return NumberFormat(
        name, element, "block", ("weight", "input"), bits + 0.25,
        f"{element.upper()}, power-of-two scale (E8M0) per 32 inputs", block_size=32, scale="e8m0", is_dynamic=True,
    )  # fmt: skip


# fmt: off - one format a line or two
_ALL = (
    NumberFormat("fp8", "e4m3", "tensor", ("weight", "input", "kv"), 8.0, "E4M3, one scale per tensor"),
    NumberFormat("fp8_per_channel", "e4m3", "channel", ("weight",), 8.0, "E4M3, one scale per output row"),
    NumberFormat(
        "fp8_per_token", "e4m3", "token", ("input",), 8.0, "E4M3, scale per token at run time", is_dynamic=True
    ),
    NumberFormat(
        "fp8_2d",
        "e4m3",
        "block",
        ("weight",),
        8.0,
        "E4M3, fp32 scale per tile of 128 x 128",
        block_size=128,
        block_rows=128,
    ),
    NumberFormat("int8_per_channel", "int8", "channel", ("weight",), 8.0, "INT8, one scale per output row"),
    NumberFormat("int8", "int8", "tensor", ("input",), 8.0, "INT8, one scale per tensor"),
    NumberFormat(
        "int8_per_token", "int8", "token", ("input",), 8.0, "INT8, scale per token at run time", is_dynamic=True
    ),
    *(_int4(size) for size in (32, 64, 128)),
    NumberFormat(
        "int4_block128_fp8",
        "int4",
        "block",
        ("weight",),
        4.25,
        "INT4, fp32 scale per 128 inputs, and the fp32 scale of an FP8 product",
        block_size=128,
        packed_rows=2,
        has_global_scale=True,
        has_chosen_blocks=True,
    ),
    _nvfp4("nvfp4", ("weight", "input", "kv"), "E2M1, E4M3 scale per 16 inputs, fp32 scale per tensor"),
    _nvfp4("nvfp4_static", ("weight",), "NVFP4 whose block scales are chosen by the algorithm", has_chosen_blocks=True),
    _nvfp4(
        "nvfp4_four_over_six",
        ("weight",),
        "NVFP4 with room for block scales that map the largest value to 4",
        has_chosen_blocks=True,
    ),
    _nvfp4("nvfp4_block32", ("weight",), "E2M1, E4M3 scale per 32 inputs, fp32 scale per tensor", 32),
    _nvfp4("nvfp4_block32_fp8", ("weight",), "E2M1, E4M3 scale per 32 inputs, in the range of FP8", 32),
    _mx("mxfp4", "e2m1", 4),
    _mx("mxfp6", "e3m2", 6),
    _mx("mxfp8", "e4m3", 8),
    _mx("mxint8", "int8", 8),
    NumberFormat("fp8_cast", "e4m3", "tensor", ("kv",), 8.0, "E4M3 with the constant scale 1.0", constant_amax=448.0),
    NumberFormat(
        "nvfp4_cast",
        "e2m1",
        "block",
        ("kv",),
        4.5,
        "E2M1, E4M3 scale per 16 values, under a constant range of 448",
        block_size=16,
        scale="e4m3",
        has_global_scale=True,
        constant_amax=448.0,
    ),
    NumberFormat(
        "fp8_affine", "e4m3", "tensor", ("kv",), 8.0, "E4M3 of what differs from the channel's mean", has_bias=True
    ),
    _nvfp4("nvfp4_affine", ("kv",), "NVFP4 of what differs from the channel's mean", has_bias=True),
    _nvfp4("nvfp4_rotate", ("kv",), "NVFP4 of rows rotated by a Hadamard matrix"),
)
# fmt: on
FORMATS: dict[str, NumberFormat] = {fmt.name: fmt for fmt in _ALL}


def formats_for(role: Role) -> list[str]:
    """Names of the formats that a recipe may give to `role`."""
    return [name for name, fmt in FORMATS.items() if role in fmt.roles]


def plain_formats_for(role: Role) -> list[str]:
    """Those that may be given to `role` in a model that stays in PyTorch: more than servers know.

    Weights may have one INT8 scale, inputs a static scale for each channel.
    """
    own = formats_for(role)
    if role == "weight":
        return [*own, "int8"]
    if role == "input":
        return [*own, *(name for name, fmt in FORMATS.items() if fmt.granularity == "channel" and name not in own)]
    return own
