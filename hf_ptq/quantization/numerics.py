"""ModelOpt's numerics: which of our number formats a quantizer's attributes mean.

ModelOpt describes a quantizer by `num_bits` (an integer, or exponent and mantissa as `e4m3`), the `axis` or the
`block_sizes` that share a scale, and switches. The attributes are put into one short phrase (`phrase`), and a table
says what the phrase is called here, for each tensor that can have it. What changes no number in an export (training,
emulation, ONNX) is accepted and has no effect; anything else that the table does not know is a reason, which becomes a
refusal where some tensor of the model is to have it. Names of formats only; their arithmetic is in formats/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator

from hf_ptq.quantization.formats.description import FORMATS, Role
from hf_ptq.quantization.rules import ATTENTION, LINEAR, ROLE_OF, Tensor

FLOATS = ("e4m3", "e5m2", "e2m1", "e1m2", "e0m3", "e3m0", "e3m2", "e2m3", "e8m0")
# Phrase -> for each kind of tensor the format's name (attributes: Model Optimizer's configs/numerics).
MEANING: dict[str, dict[Role, str]] = {
    "e4m3": {"weight": "fp8", "input": "fp8", "kv": "fp8"},
    "e4m3, constant range": {"kv": "fp8_cast"},
    "e4m3, bias": {"kv": "fp8_affine"},
    "e4m3, axis 0": {"weight": "fp8_per_channel"},
    "e4m3, each row at run time": {"input": "fp8_per_token"},
    "e4m3, blocks 128x128": {"weight": "fp8_2d"},
    "8 bits": {"input": "int8"},
    "8 bits, axis 0": {"weight": "int8_per_channel"},
    "8 bits, each row at run time": {"input": "int8_per_token"},
    "4 bits, blocks 32": {"weight": "int4_block32"},
    "4 bits, blocks 64": {"weight": "int4_block64"},
    "4 bits, blocks 128": {"weight": "int4_block128"},
    "4 bits, blocks 128, then e4m3": {"weight": "int4_block128_fp8"},
    "e2m1, blocks 16 at run time, e4m3 scales": {"weight": "nvfp4", "input": "nvfp4", "kv": "nvfp4"},
    "e2m1, blocks 16 at run time, e4m3 scales, constant range": {"kv": "nvfp4_cast"},
    "e2m1, blocks 16 at run time, e4m3 scales, bias": {"kv": "nvfp4_affine"},
    "e2m1, blocks 16 at run time, e4m3 scales, rotated": {"kv": "nvfp4_rotate"},
    "e2m1, blocks 16, e4m3 scales": {"weight": "nvfp4_static"},
    "e2m1, blocks 16, e4m3 scales, four over six": {"weight": "nvfp4_four_over_six"},
    "e2m1, blocks 32 at run time, e4m3 scales": {"weight": "nvfp4_block32"},
    "e2m1, blocks 32 at run time, e8m0 scales": {"weight": "mxfp4", "input": "mxfp4"},
    "e3m2, blocks 32 at run time, e8m0 scales": {"weight": "mxfp6", "input": "mxfp6"},
    "e4m3, blocks 32 at run time, e8m0 scales": {"weight": "mxfp8", "input": "mxfp8"},
    "8 bits, blocks 32 at run time, e8m0 scales": {"weight": "mxint8", "input": "mxint8"},
}
# A weight's format that depends on the input's: its block scales leave room for the product's own scale.
BESIDE: dict[tuple[str, str], str] = {("nvfp4_block32", "fp8"): "nvfp4_block32_fp8"}
LAST_DIMS = ((-1,), (-2, -1), (0, 1))  # of a weight [out, in]; the words of blocks that some format may have
WORDS: dict[Tensor, str] = {"output": "output of a linear", "q": "query", "p": "attention probability"}


class Attributes(BaseModel):
    """The attributes of one quantizer, with ModelOpt's names and defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enable: bool = True
    num_bits: int | str = 8
    effective_bits: float | None = None
    axis: int | tuple[int, ...] | None = None
    fake_quant: bool = True
    unsigned: bool = False
    narrow_range: bool = False
    type: Literal["static", "dynamic"] = "static"
    block_sizes: dict[int | str, Any] | None = None
    bias: dict[int | str, Any] | None = None
    trt_high_precision_dtype: str = "Float"
    calibrator: Any = "max"
    rotate: bool | dict[str, Any] = False
    pass_through_bwd: bool = True
    backend: str | None = None
    backend_extra_args: dict[str, Any] | None = None
    use_constant_amax: bool = False
    constant_amax: float | None = None

    @field_validator("enable")
    @classmethod
    def _on(cls, value: bool) -> bool:
        if not value:
            raise ValueError("the entry turns its quantizers on or off: write enable beside quantizer_name")
        return value

    @field_validator("num_bits", mode="before")
    @classmethod
    def _bits(cls, value: Any) -> Any:
        """(4, 3) is written e4m3."""
        name = f"e{value[0]}m{value[1]}" if isinstance(value, (list, tuple)) and len(value) == 2 else value
        if isinstance(name, str) and name not in FLOATS:
            raise ValueError(f"{value!r} is no number of bits; floats are {', '.join(FLOATS)}")
        return name


def meaning(attributes: Sequence[Attributes]) -> tuple[dict[Tensor, str], dict[Tensor, str]]:
    """(tensor -> format, tensor -> why there is none) of a `cfg`; several attributes stand for one after the other."""
    said = ", then ".join(phrase(each) for each in attributes)
    formats: dict[Tensor, str] = {}
    reasons: dict[Tensor, str] = {}
    for tensor in (*LINEAR, *ATTENTION):
        role = ROLE_OF.get(tensor)
        name = MEANING.get(said, {}).get(role) if role else None
        if role is None:
            reasons[tensor] = f"no server reads a quantized {WORDS[tensor]}"
        elif name is None:
            reasons[tensor] = f"there is no format for this tensor with {said}"
        elif name not in FORMATS or role not in FORMATS[name].roles:
            reasons[tensor] = f"the format {name} ({said}) is not built yet"
        else:
            formats[tensor] = name
    return formats, reasons


def phrase(attributes: Attributes) -> str:
    """The attributes in words, those with an effect."""
    bits = attributes.num_bits
    parts = [f"{bits} bits" if isinstance(bits, int) else bits]
    if attributes.axis is not None:
        parts.append(f"axis {attributes.axis}")
    parts += _blocks(attributes.block_sizes or {}, attributes.type == "dynamic")
    parts += ["constant range"] if attributes.use_constant_amax else []
    parts += [f"constant range {attributes.constant_amax:g}"] if attributes.constant_amax is not None else []
    parts += ["bias"] if attributes.bias else []
    parts += _rotation(attributes.rotate)
    parts += [word for word in ("unsigned", "narrow_range") if getattr(attributes, word)]
    parts += [f"calibrator {attributes.calibrator}"] if attributes.calibrator != "max" else []
    parts += [f"backend {attributes.backend}"] if attributes.backend else []
    return ", ".join(parts)


def _rotation(rotate: bool | Mapping[str, Any]) -> list[str]:
    """The rotation in words; its precision changes nothing that is stored, any other setting is another rotation."""
    if isinstance(rotate, bool):
        return ["rotated"] if rotate else []
    settings = {key: value for key, value in rotate.items() if key not in ("enable", "rotate_fp32") and value}
    if settings.get("mode") == "rotate":
        del settings["mode"]
    if not rotate.get("enable"):  # off unless said
        return []
    return ["rotated" + "".join(f", {key} {value}" for key, value in settings.items())]


def _blocks(sizes: Mapping[int | str, Any], is_dynamic: bool) -> list[str]:
    """The blocks in words; -1 is the last dimension, a size of None the whole of it. Others than the last are named."""
    dims = {key: size for key, size in sizes.items() if isinstance(key, int)}
    rest = {key: value for key, value in sizes.items() if not isinstance(key, int)}
    at_run_time = is_dynamic or rest.pop("type", "static") == "dynamic"
    scales = rest.pop("scale_bits", None)
    over_six = rest.pop("four_over_six", False)
    if dims == {-1: None}:
        parts = ["each row"]
    elif tuple(sorted(dims)) in LAST_DIMS:
        parts = ["blocks " + "x".join(str(dims[key]) for key in sorted(dims))]
    elif dims:
        parts = ["blocks " + " and ".join(f"of {size} along dimension {key}" for key, size in sorted(dims.items()))]
    else:
        parts = ["the tensor"] if is_dynamic else []
    if parts and at_run_time:
        parts[-1] += " at run time"
    if scales is not None:
        name = f"e{scales[0]}m{scales[1]}" if isinstance(scales, (list, tuple)) else str(scales)
        parts.append(f"{name} scales")
    return [*parts, *(["four over six"] if over_six else []), *(f"{key} {value}" for key, value in rest.items())]
