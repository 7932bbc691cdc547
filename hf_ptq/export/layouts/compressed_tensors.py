"""The compressed-tensors layout: config.json alone, several formats as groups that name their modules.

    FP8              weight; weight_scale [1]; input_scale [1]
    FP8 by channel   weight; weight_scale [out, 1]; activations by token at run time
    FP8 in blocks    weight; weight_scale [out / 128, in / 128]
    INT8             weight int8; weight_scale [out, 1]; input_scale [1], or by token at run time
    INT8, INT4 alone weight_packed int32 (packing.py); weight_scale; weight_shape int64 [2]
    NVFP4            weight_packed; weight_scale; weight_global_scale [1] = 1 / weight_scale_2;
                     input_global_scale [1] = 1 / input_scale
    MXFP4, MXFP8     weight_packed (weight for MXFP8); weight_scale, the exponents as bytes

A name in `ignore` and in a group's targets is a module's exact name; a single group is for every Linear that is not
ignored. (Source: the compressed-tensors package, versions 0.17 to 0.20.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hf_ptq.errors import Problem
from hf_ptq.export.config_files import package_version
from hf_ptq.export.layouts.layout import (
    ConfigFiles,
    Contents,
    Field,
    InputTensor,
    Layout,
    Scheme,
    Shape,
    Storage,
    by_fields,
)
from hf_ptq.export.layouts.packing import codes_to_words, words_to_codes
from hf_ptq.export.servers import EXPERT, served_modules
from hf_ptq.export.support import narrowed
from hf_ptq.quantization.formats.codec import Codec
from hf_ptq.quantization.formats.int4 import pack_rows, unpack_rows

NAME = "compressed-tensors"
VERSION = "0.20.1"  # of the package whose configuration this is like
KV_SCHEME: dict[str, Any] = {
    "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True,
}  # fmt: skip
FP8_CACHES = (("fp8", "fp8"), ("fp8_cast", "fp8_cast"))
UINT8 = "torch.uint8"  # how the configuration spells the type of exponents


# --- tensors ---------------------------------------------------------------------------------------


def _last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(-1)


def _first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.squeeze(-1)


def _with_one(shape: Shape) -> Shape:
    return (*shape, 1)


def _inverted(scale: torch.Tensor) -> torch.Tensor:
    return scale.reciprocal().unsqueeze(-1)


def _back_inverted(scale: torch.Tensor) -> torch.Tensor:
    return scale.squeeze(-1).reciprocal()


def _input_scale(codec: Codec, amax: torch.Tensor) -> torch.Tensor:
    scale = codec.input_scale(amax)
    assert scale is not None
    return scale.reshape(1)


def _input_global_scale(codec: Codec, amax: torch.Tensor) -> torch.Tensor:
    return _input_scale(codec, amax).reciprocal()


def _rows_doubled_words(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-2] * 2, shape[-1] // 8)


def _bytes_in_words(shape: Shape) -> Shape:
    return (*shape[:-1], shape[-1] // 4)


CODES = Field("weight", "weight")
PACKED = Field("weight", "weight_packed")
BLOCK_SCALE = Field("weight_scale", "weight_scale")
SCALE_WITH_ONE = Field(
    "weight_scale", "weight_scale", _with_one, forward=_last, back=_first
)  # [] -> [1], [o] -> [o, 1]
GLOBAL_SCALE = Field("weight_scale_2", "weight_global_scale", _with_one, forward=_inverted, back=_back_inverted)
# Blocks as our codec has them, [out / 128, 1, in / 128, 1].
SQUARE_SCALE = Field(
    "weight_scale",
    "weight_scale",
    lambda shape: (*shape[:-4], shape[-4], shape[-2]),
    forward=lambda scale: scale.squeeze(-1).squeeze(-2),
    back=lambda scale: scale.unsqueeze(-2).unsqueeze(-1),
)
INT4_WORDS = Field(
    "weight",
    "weight_packed",
    _rows_doubled_words,
    torch.int32,
    forward=lambda packed: codes_to_words(unpack_rows(packed), 4),
    back=lambda words: pack_rows(words_to_codes(words, 4)),
)
INT8_WORDS = Field(
    "weight",
    "weight_packed",
    _bytes_in_words,
    torch.int32,
    forward=partial(codes_to_words, bits=8),
    back=partial(words_to_codes, bits=8),
)
STATIC_INPUT = InputTensor("input_scale", (1,), _input_scale)
STATIC_GLOBAL_INPUT = InputTensor("input_global_scale", (1,), _input_global_scale)


# --- schemes ---------------------------------------------------------------------------------------


def arguments(bits: int, kind: str, strategy: str, dynamic: bool | str = False, **more: object) -> dict[str, Any]:
    """Quantization arguments in the words of the configuration."""
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": dynamic} | more


@dataclass(frozen=True)
class Group:
    """How layers of one scheme are stored and described. `title`: what users know it by."""

    title: str
    format: str
    weights: dict[str, Any]
    inputs: dict[str, Any] | None
    fields: tuple[Field, ...]
    input: InputTensor | None = None
    shape_name: str | None = None

    def entry(self, targets: Iterable[str]) -> dict[str, Any]:
        """The member of `config_groups`."""
        return {
            "targets": list(targets),
            "weights": dict(self.weights),
            "input_activations": dict(self.inputs) if self.inputs else None,
            "output_activations": None,
            "format": self.format,
        }


def _int4(block: int) -> Group:
    weights = arguments(4, "int", "group", group_size=block)
    return Group("W4A16", "pack-quantized", weights, None, (INT4_WORDS, BLOCK_SCALE), shape_name="weight_shape")


_FP8 = arguments(8, "float", "tensor")
_FP8_CHANNEL = arguments(8, "float", "channel")
_FP8_SQUARE = arguments(8, "float", "block", block_structure=[128, 128])
_FP8_TOKEN = arguments(8, "float", "token", dynamic=True)
_INT8_CHANNEL = arguments(8, "int", "channel")
_INT8_TOKEN = arguments(8, "int", "token", dynamic=True)
_INT8 = arguments(8, "int", "tensor")
_NVFP4 = arguments(4, "float", "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")
_NVFP4_INPUT = _NVFP4 | {"dynamic": "local"}
_MXFP4 = arguments(4, "float", "group", group_size=32, scale_dtype=UINT8, zp_dtype=UINT8)
_MXFP8 = arguments(8, "float", "group", group_size=32, scale_dtype=UINT8, zp_dtype=UINT8)
_DYNAMIC = {"dynamic": True}
_SCALED = (CODES, SCALE_WITH_ONE)
_NVFP4_FIELDS = (PACKED, BLOCK_SCALE, GLOBAL_SCALE)
_W4A4 = Group("NVFP4", "nvfp4-pack-quantized", _NVFP4, _NVFP4_INPUT, _NVFP4_FIELDS, STATIC_GLOBAL_INPUT)
_W4A16 = Group("NVFP4A16", "nvfp4-pack-quantized", _NVFP4, None, _NVFP4_FIELDS)
NVFP4_WEIGHTS = ("nvfp4", "nvfp4_static", "nvfp4_four_over_six")

GROUPS: dict[Scheme, Group] = {
    ("fp8", "fp8"): Group("FP8", "float-quantized", _FP8, _FP8, _SCALED, STATIC_INPUT),
    ("fp8", None): Group("FP8A16", "float-quantized", _FP8, None, _SCALED),
    ("fp8_per_channel", "fp8_per_token"): Group("FP8_DYNAMIC", "float-quantized", _FP8_CHANNEL, _FP8_TOKEN, _SCALED),
    ("fp8_per_channel", None): Group("FP8A16 by channel", "float-quantized", _FP8_CHANNEL, None, _SCALED),
    ("fp8_2d", None): Group("FP8A16 in blocks", "float-quantized", _FP8_SQUARE, None, (CODES, SQUARE_SCALE)),
    ("int8_per_channel", "int8_per_token"): Group("W8A8", "int-quantized", _INT8_CHANNEL, _INT8_TOKEN, _SCALED),
    ("int8_per_channel", "int8"): Group("W8A8 static", "int-quantized", _INT8_CHANNEL, _INT8, _SCALED, STATIC_INPUT),
    ("int8_per_channel", None): Group(
        "W8A16", "pack-quantized", _INT8_CHANNEL, None, (INT8_WORDS, SCALE_WITH_ONE), shape_name="weight_shape"
    ),
    ("int4_block32", None): _int4(32),
    ("int4_block64", None): _int4(64),
    ("int4_block128", None): _int4(128),
    **dict.fromkeys(((weight, "nvfp4") for weight in NVFP4_WEIGHTS), _W4A4),
    **dict.fromkeys(((weight, None) for weight in NVFP4_WEIGHTS), _W4A16),
    ("mxfp4", "mxfp4"): Group(
        "MXFP4", "mxfp4-pack-quantized", _MXFP4, _MXFP4 | _DYNAMIC, (PACKED, BLOCK_SCALE)
    ),
    ("mxfp4", None): Group("MXFP4A16", "mxfp4-pack-quantized", _MXFP4, None, (PACKED, BLOCK_SCALE)),
    ("mxfp8", "mxfp8"): Group("MXFP8", "mxfp8-quantized", _MXFP8, _MXFP8 | _DYNAMIC, (CODES, BLOCK_SCALE)),
    ("mxfp8", None): Group("MXFP8A16", "mxfp8-quantized", _MXFP8, None, (CODES, BLOCK_SCALE)),
}  # fmt: skip


def _storage(scheme: Scheme) -> Storage | None:
    group = GROUPS.get(scheme)
    return by_fields(scheme[0], group.fields, group.input, group.shape_name) if group else None


def _kv_problem(kv: tuple[str, str]) -> str | None:
    return None if kv in FP8_CACHES else f"keys in {kv[0]} with values in {kv[1]}: it has FP8 caches only"


def _kv_names(layer: str) -> tuple[str, str]:
    return f"{layer}.k_scale", f"{layer}.v_scale"


# --- configuration ---------------------------------------------------------------------------------


def _describe(contents: Contents) -> ConfigFiles:
    kinds: dict[Scheme, list[str]] = {}
    for module in sorted(contents.schemes):
        kinds.setdefault(contents.schemes[module], []).append(module)
    single = len(kinds) == 1
    groups = {
        f"group_{number}": GROUPS[scheme].entry(["Linear"] if single else modules)
        for number, (scheme, modules) in enumerate(kinds.items())
    }
    formats = {GROUPS[scheme].format for scheme in kinds}
    block = {
        "quant_method": NAME,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(contents.unquantized),
        "kv_cache_scheme": dict(KV_SCHEME) if contents.kv in FP8_CACHES else None,
        "global_compression_ratio": None,
        "version": VERSION,
        "producer": {"name": "hf-ptq", "version": package_version()},
    }
    return ConfigFiles(block, None)


def _problems(contents: Contents) -> Iterator[Problem]:
    """Modules that servers merge of which only some are quantized."""
    for module in served_modules([*contents.schemes, *contents.unquantized]):
        schemes = {contents.schemes.get(linear) for linear in module.linears}
        if len(schemes) > 1:
            what = f"{module.name}: its {len(module.linears)} linears are not quantized alike, servers know one format"
            yield Problem(what, "change the recipe so that what servers fuse is quantized together")


def _warnings(contents: Contents) -> Iterator[str]:
    experts = {scheme for module, scheme in contents.schemes.items() if EXPERT.fullmatch(module)}
    kinds = {(GROUPS[s].title, EXPERT.fullmatch(m) is not None) for m, s in contents.schemes.items()}
    yield from narrowed(kinds, NAME)
    for scheme in sorted(experts, key=str):
        if scheme[0] in NVFP4_WEIGHTS:
            yield "transformers loads NVFP4 experts of this layout without their global scale: it is for servers only"


def _disagreements(config: Mapping[str, Any], _: Mapping[str, Any], contents: Contents) -> Iterator[str]:
    """What the groups and the ignore list say of each linear, against what it is."""
    block = config.get("quantization_config") or {}
    ignored = set(block.get("ignore") or ())
    groups = (block.get("config_groups") or {}).values()
    by_target = {target: group for group in groups for target in group.get("targets") or ()}
    for module in (*contents.schemes, *contents.unquantized):
        found = None if module in ignored else by_target.get(module, by_target.get("Linear"))
        scheme = contents.schemes.get(module)
        meant = GROUPS[scheme].entry(()) if scheme else None
        if (found and {**found, "targets": []}) != meant:
            yield f"config.json: {module} is {scheme or 'not quantized'}, the configuration says otherwise"


LAYOUT = Layout(
    name=NAME,
    title="vLLM's and transformers' own; the layout of LLM Compressor",
    storage=_storage,
    kv_problem=_kv_problem,
    kv_names=_kv_names,
    kv_shape=(1,),
    describe=_describe,
    problems=_problems,
    warnings=_warnings,
    disagreements=_disagreements,
)
