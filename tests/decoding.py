"""Stored tensors -> values in float64, by tables and bit strings, with none of the product's arithmetic.

Only the format's description (element, block) is the product's. The value of an element is its code times its step.
`judge` holds a whole export against the independent checker, or against this where the checker does not know it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from tiny import load_tensors

from hf_ptq.quantization.formats.description import FORMATS

Tensors = dict[str, torch.Tensor]

INTEGERS = torch.arange(-128, 128, dtype=torch.float64)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E3M2 = torch.tensor([m / 16 if e == 0 else (4 + m) / 16 * 2 ** (e - 1) for e in range(8) for m in range(4)]).double()
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
E4M3 = E4M3[E4M3.isfinite()].unique()
# Element -> its values, sorted.
GRIDS = {
    "e4m3": E4M3,
    "e2m1": torch.cat([-E2M1, E2M1]).unique(),
    "e3m2": torch.cat([-E3M2, E3M2]).unique(),
    "int8": INTEGERS,
    "int4": INTEGERS[120:136],
}

# Formats that the checker does not know by their honest name -> the relative error that rounding may make.
OWN_ERRORS = {"W4A16": 0.18, "MXFP6": 0.06, "MXINT8": 0.015, "W4A16_MXFP4": 0.18, "W4A16_NVFP4 32": 0.13}
FORMAT_RULES = ("CONFIG", "SHAPES", "SCALES", "SNR", "NAMES")


def codes_of(name: str, tensors: Tensors) -> torch.Tensor:
    """The values of a matrix's codes before their scales, [out, in]."""
    stored, element = tensors["weight"], FORMATS[name].element
    if element == "e2m1":
        nibbles = torch.stack([stored & 15, stored >> 4], -1).flatten(-2).int()
        return torch.cat([E2M1, -E2M1])[nibbles]
    if element == "int4":
        nibbles = torch.stack([stored & 15, stored >> 4], 1).flatten(0, 1).double()
        return torch.where(nibbles > 7, nibbles - 16, nibbles)
    if element == "e3m2":
        bits = "".join(f"{byte:08b}"[::-1] for byte in stored.flatten().tolist())
        codes = [int(bits[i : i + 6][::-1], 2) for i in range(0, len(bits), 6)]
        return torch.cat([E3M2, -E3M2])[torch.tensor(codes)].reshape(stored.shape[0], -1)
    return stored.double()


def step_of(name: str, tensors: Tensors, shape: torch.Size) -> torch.Tensor:
    """What one unit of each element's code is worth, [out, in]."""
    fmt, scale = FORMATS[name], tensors["weight_scale"]
    number = torch.exp2(scale.double() - 127) if fmt.scale == "e8m0" else scale.double()
    step = spread(name, number, shape)
    if fmt.scale == "e4m3":
        step = step * tensors["weight_scale_2"].double()
    return step / 64 if name == "mxint8" else step


def spread(name: str, per_part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """One number for each part of a matrix that shares a scale -> one for each element."""
    fmt = FORMATS[name]
    blocks = {"tensor": shape, "channel": (1, shape[1]), "block": (fmt.block_rows, fmt.input_multiple)}
    rows, inputs = blocks[fmt.granularity]
    grid = per_part.reshape(-(-shape[0] // rows), -(-shape[1] // inputs))
    return grid.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(inputs, 1)[:, : shape[1]]


def decoded(name: str, tensors: Tensors) -> torch.Tensor:
    """The weight [out, in] that the tensors stand for."""
    codes = codes_of(name, tensors)
    return codes * step_of(name, tensors, codes.shape)


def parts_of(export: Path) -> dict[str, Tensors]:
    """Quantized module -> its tensors."""
    tensors = load_tensors(export)
    modules = [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]
    return {
        module: {
            name.removeprefix(f"{module}."): t
            for name, t in tensors.items()
            if name.startswith(f"{module}.") and not name.endswith((".k_scale", ".v_scale", ".bias"))
        }
        for module in modules
    }


def judge(
    source: Path, export: Path, weight: str, check_export: Callable[..., None], only: Callable[[str], bool] = bool
) -> None:
    """The export passes the checker, or its weights (of the modules that `only` is true for) decode to the source's."""
    flat = json.loads((export / "config.json").read_text())["quantization_config"]
    names = (flat["quant_algo"], f"{flat['quant_algo']} {flat.get('group_size')}")
    own = next((name for name in names if name in OWN_ERRORS), None)
    check_export(source, export, without=FORMAT_RULES if own else ())
    if own is None:
        return
    weights = load_tensors(source)
    parts = {module: tensors for module, tensors in parts_of(export).items() if only(module)}
    assert parts
    for module, tensors in parts.items():
        original = weights[f"{module}.weight"].double()
        values = decoded(weight, tensors)
        assert values.shape == original.shape
        assert (values - original).norm() <= OWN_ERRORS[own] * original.norm(), module
        scales = [t.float() for name, t in tensors.items() if name != "weight" and t.dtype != torch.uint8]
        assert all(bool(((s > 0) & s.isfinite()).all()) for s in scales)
