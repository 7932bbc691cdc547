"""What number formats there are: names and properties, without arithmetic and without torch.

A number format says how *one tensor* is stored or quantized: the element type, over which part of the tensor a
scale is shared, and of what type the scales are. Recipes name formats; `--list` and recipe validation read this
table without importing torch. The arithmetic of each entry is the codec of the same name in `formats/__init__.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["weight", "input", "kv"]
Granularity = Literal["tensor", "channel", "token", "block"]


@dataclass(frozen=True)
class NumberFormat:
    """One way to store a tensor.

    `granularity`: the part of the tensor that shares a scale: all of it, an output row (`channel`), a row of
    activations (`token`), or `block_size` consecutive inputs. `has_global_scale`: one more fp32 scale per tensor,
    shared by the members of a fused group. `is_dynamic`: scales are computed from the data at run time, so there is
    nothing to calibrate. `constant_amax`: the range is this number whatever the data.
    """

    name: str
    element: Literal["e4m3", "e2m1", "int8"]
    granularity: Granularity
    roles: tuple[Role, ...]
    bits: float  # stored bits per element, block scales included
    block_size: int | None = None
    has_global_scale: bool = False
    is_dynamic: bool = False
    constant_amax: float | None = None
    description: str = ""

    @property
    def input_multiple(self) -> int:
        """The number of inputs (last dimension) must be a multiple of this."""
        return self.block_size or 1

    @property
    def is_shared(self) -> bool:
        """True where one amax serves a whole fused group."""
        return self.has_global_scale or self.granularity == "tensor"

    @property
    def needs_data(self) -> bool:
        """True where quantizing an activation needs a calibrated amax."""
        return not self.is_dynamic and self.constant_amax is None


_ALL = (
    NumberFormat("fp8", "e4m3", "tensor", ("weight", "input", "kv"), 8.0, description="E4M3, one scale per tensor"),
    NumberFormat("fp8_per_channel", "e4m3", "channel", ("weight",), 8.0, description="E4M3, one scale per output row"),
    NumberFormat(
        "fp8_per_token",
        "e4m3",
        "token",
        ("input",),
        8.0,
        is_dynamic=True,
        description="E4M3, scale per token at run time",
    ),
    NumberFormat(
        "nvfp4",
        "e2m1",
        "block",
        ("weight", "input", "kv"),
        4.5,
        block_size=16,
        has_global_scale=True,
        description="E2M1, E4M3 scale per 16 inputs, fp32 scale per tensor",
    ),
    NumberFormat("int8", "int8", "tensor", ("input",), 8.0, description="INT8, one static scale per tensor"),
    NumberFormat("int8_per_channel", "int8", "channel", ("weight",), 8.0, description="INT8, one scale per output row"),
    NumberFormat(
        "fp8_cast", "e4m3", "tensor", ("kv",), 8.0, constant_amax=448.0, description="E4M3 with the constant scale 1.0"
    ),
    NumberFormat(
        "nvfp4_cast",
        "e2m1",
        "block",
        ("kv",),
        4.5,
        block_size=16,
        has_global_scale=True,
        constant_amax=448.0,
        description="E2M1, E4M3 scale per 16 values, under a constant range of 448",
    ),
)
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
