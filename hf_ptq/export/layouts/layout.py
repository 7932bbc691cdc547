"""What an output layout consists of: names and shapes of stored tensors, and the configuration that describes them.

A codec makes the tensors of a weight; a layout says how they are stored: under which names, in which shapes, with
which scales inverted, and what config.json has to say about them. Both are pure, so that the export is known to the
byte before a weight is read, and a stored tensor decodes to what the codec meant (`Storage.decode`).

    number format --codec--> tensors --Storage--> stored tensors;   all layers' formats --describe--> configuration

A new layout is a `Layout` in a file beside this one and a line in `LAYOUTS`. This file knows no layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hf_ptq.errors import Problem
from hf_ptq.quantization.assignment import Assignment, QuantizedWeight
from hf_ptq.quantization.formats import codec as arithmetic
from hf_ptq.quantization.formats import codecs
from hf_ptq.quantization.formats.codec import Codec, Tensors

Scheme = tuple[str, str | None]  # (weight format, input format)
Shape = tuple[int, ...]
WEIGHT_TENSOR = "weight"


def same(value: Any) -> Any:
    """The tensor or the shape as it is."""
    return value


@dataclass(frozen=True)
class Field:
    """One stored tensor of a module: `codec_name` is the codec's name of it, `name` the layout's.

    `forward` and `back` work on tensors with any leading dimensions (experts); `shape` on a shape, `dtype` None keeps
    the codec's.
    """

    codec_name: str
    name: str
    shape: Callable[[Shape], Shape] = same
    dtype: torch.dtype | None = None
    forward: Callable[[torch.Tensor], torch.Tensor] = same
    back: Callable[[torch.Tensor], torch.Tensor] = same


@dataclass(frozen=True)
class InputTensor:
    """What is stored of a calibrated activation: `make` takes its codec and its amax (fp32 scalar)."""

    name: str
    shape: Shape
    make: Callable[[Codec, torch.Tensor], torch.Tensor]
    is_scale: bool = True


@dataclass(frozen=True)
class Storage:
    """How a layout stores one weight format.

    `layout(shape, dtype)`: name -> (dtype, shape) of what is stored for a weight [out, in] whose source has `dtype`.
    `store(encoded, shape, dtype)`: the codec's tensors of a weight [..., out, in] as they are stored.
    `decode(stored)`: the weight that they stand for, fp32. `scales`: names of tensors that have to be finite and above
    zero. `rounds_to_source`: what is stored is a weight in the source's dtype, rounded to it.
    """

    layout: Callable[[Shape, torch.dtype], arithmetic.Layout]
    store: Callable[[Tensors, Shape, torch.dtype], Tensors]
    decode: Callable[[Tensors], torch.Tensor]
    scales: tuple[str, ...] = ()
    input: InputTensor | None = None
    rounds_to_source: bool = False


class ConfigFiles(NamedTuple):
    """`block`: config.json's quantization_config; `nested`: hf_quant_config.json; None where there is none."""

    block: dict[str, Any] | None
    nested: dict[str, Any] | None


@dataclass(frozen=True)
class Contents:
    """What an export holds, as its configuration has to tell it.

    `schemes`: source module -> formats, of every quantized linear. `unquantized`: the other modules that servers build
    as linears. `kv`: formats of keys and values; `kv_layers`: source modules whose cache has scales. `joined`: modules
    that hold all experts of a layer in one tensor. `shapes`: [out, in] of each module in `schemes`.
    """

    schemes: Mapping[str, Scheme]
    unquantized: tuple[str, ...]
    kv: tuple[str, str] | None = None
    kv_layers: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    shapes: Mapping[str, Shape] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """One output layout.

    `storage(scheme)`: how weights of that scheme are stored, None where the layout cannot express it.
    `kv_problem(kv)`: why the layout cannot express this cache, None where it can. `kv_names(layer)`: the tensors of
    the scales of keys and values, of shape `kv_shape`. `describe`: the configuration. `problems`: what servers could
    not read of it at all. `warnings`: what narrows its use. `disagreements(config.json, hf_quant_config.json,
    contents)`: what is wrong with files that were read back. `keeps_ranges`: the calibrated ranges are written into a
    folder of their own. `joins_experts`: it has names for tensors that hold all experts of a layer.
    """

    name: str
    title: str
    storage: Callable[[Scheme], Storage | None]
    kv_problem: Callable[[tuple[str, str]], str | None]
    kv_names: Callable[[str], tuple[str, str]] | None
    describe: Callable[[Contents], ConfigFiles]
    problems: Callable[[Contents], Iterable[Problem]]
    warnings: Callable[[Contents], Iterable[str]]
    disagreements: Callable[[Mapping[str, Any], Mapping[str, Any], Contents], Iterable[str]]
    kv_shape: Shape = ()
    keeps_ranges: bool = False
    joins_experts: bool = False

    def stored(self, scheme: Scheme) -> Storage:
        """`storage` of a scheme that the layout is known to express."""
        storage = self.storage(scheme)
        assert storage is not None, f"{self.name} cannot hold {scheme}; planning refuses that"
        return storage


def contents_of(assignment: Assignment, unquantized: Iterable[str]) -> Contents:
    """What an assignment puts into the export."""
    cache = assignment.kv
    return Contents(
        schemes={module: q.scheme for q in assignment.quantized for module in _named(q)},
        shapes={module: q.view.shape for q in assignment.quantized for module in _named(q)},
        joined=tuple(q.view.joined for q in assignment.quantized if q.view.joined),
        unquantized=tuple(unquantized),
        kv=(cache.k.name, cache.v.name) if cache else None,
        kv_layers=tuple(cache.layers.values()) if cache and cache.needs_data else (),
    )


def _named(weight: QuantizedWeight) -> tuple[str, ...]:
    """The modules as the configuration has them: experts that are written as one tensor are one."""
    return (weight.view.joined,) if weight.view.joined else weight.view.modules


def as_encoded(weight: str, input_tensor: InputTensor | None) -> Storage:
    """The codec's tensors as they are."""
    codec = codecs()[weight]
    return Storage(
        layout=lambda shape, _dtype: codec.layout(shape),
        store=lambda encoded, _shape, _dtype: encoded,
        decode=codec.decode,
        scales=tuple(name for name in codec.layout((128, 128)) if name != WEIGHT_TENSOR),
        input=input_tensor,
    )


def by_fields(
    weight: str, fields: tuple[Field, ...], input_tensor: InputTensor | None = None, shape_name: str | None = None
) -> Storage:
    """The codec's tensors, each by its field; with `shape_name` also [out, in] as int64 [2] under that name."""
    codec = codecs()[weight]

    def layout(shape: Shape, _dtype: torch.dtype) -> arithmetic.Layout:
        plain = codec.layout(shape)
        found = {f.name: (f.dtype or plain[f.codec_name][0], f.shape(plain[f.codec_name][1])) for f in fields}
        return found | ({shape_name: (torch.int64, (*shape[:-2], 2))} if shape_name else {})

    def store(encoded: Tensors, shape: Shape, _dtype: torch.dtype) -> Tensors:
        stored = {f.name: f.forward(encoded[f.codec_name]) for f in fields}
        if shape_name:
            stored[shape_name] = torch.tensor(shape[-2:]).expand(*shape[:-2], 2).contiguous()
        return stored

    return Storage(
        layout=layout,
        store=store,
        decode=lambda stored: codec.decode({f.codec_name: f.back(stored[f.name]) for f in fields}),
        scales=tuple(f.name for f in fields if f.codec_name != WEIGHT_TENSOR),
        input=input_tensor,
    )
