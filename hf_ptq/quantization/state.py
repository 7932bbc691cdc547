"""What a quantized model knows beside its weights, as plain data: to be saved, and given to another model.

    {"version": 1, "recipe": {...}, "ranges": {name: amax},
     "quantizers": {name: {"format": ..., "enabled": ..., "clips": ..., "learned": ..., "shape": [...]}}}

Names are those of modules without what wraps them, so that a state taken from any arrangement (DistributedDataParallel,
FSDP2, SyncBatchNorm, torch.compile) fits every other one. Everything is a string, a number or a tensor on the CPU:
`torch.load(..., weights_only=True)` reads it, and a file of it is safetensors with JSON in its header.

What was asked for is noted at the model itself (`Record`), as an attribute that no checkpoint holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from hf_ptq.errors import Problem, RunError, UserError, refuse_if_any
from hf_ptq.model.wrappers import named, unwrapped
from hf_ptq.quantization.affine import AffineQuantizer
from hf_ptq.quantization.assignment import Assignment
from hf_ptq.quantization.attach import changes, quantizers_on
from hf_ptq.quantization.quantizer import Quantizer
from hf_ptq.quantization.recipe import Recipe

VERSION = 1
State = dict[str, Any]
_RECORD = "hf_ptq_record"
_HEADER = "hf_ptq_state"
BLOCKS = " by block"  # behind a quantizer's name: the ranges of its blocks, where an algorithm chose them
BIAS = " bias"  # the mean of each channel, for formats that take it off
_PARTS = ("version", "recipe", "quantizers", "ranges")
MAX_PROBLEMS = 20


class _Facts(BaseModel):
    """What a state says of a quantizer; `shape`: of a weight, which states of the first days do not have."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: str
    enabled: bool
    clips: bool
    learned: bool
    shape: list[int] | None = None


@dataclass(frozen=True)
class Record:
    """What was done to a model. `assignment` is None for models that stay in PyTorch."""

    recipe: Recipe
    assignment: Assignment | None
    quantizers: Mapping[str, str]  # name -> format


def record_of(model: nn.Module) -> Record | None:
    """The record of a quantized model, None for others. Raises RunError where a quantized module was replaced."""
    record = vars(unwrapped(model)).get(_RECORD)
    if record is not None and (problems := changes(model, record.quantizers)):
        raise RunError(*problems)
    return record


def whole_record_of(model: nn.Module) -> Record | None:
    """The record, None also where it does not hold any more, for what quantizes anew."""
    record = vars(unwrapped(model)).get(_RECORD)
    return None if record is None or changes(model, record.quantizers) else record


def keep_record(model: nn.Module, record: Record | None) -> None:
    """Note what was done, or that nothing is left of it; whatever was noted of a part is over."""
    for module in named(model).values():
        vars(module).pop(_RECORD, None)
    if record is not None:
        vars(unwrapped(model))[_RECORD] = record


def needs_record(model: nn.Module) -> Record:
    """The record. Raises UserError for a model that was not quantized."""
    record = record_of(model)
    if record is None:
        what = f"this {type(unwrapped(model)).__name__} is not quantized"
        raise UserError(Problem(what, "call hf_ptq.quantize or restore_quantizers, with this model and no part of it"))
    return record


# --- taking and giving ---------------------------------------------------------------------------


def take_state(model: nn.Module) -> State:
    """The state of a quantized model."""
    recipe, found, modules = needs_record(model).recipe, quantizers_on(model), named(model)
    tensors = {
        "": {name: quantizer.amax for name, quantizer in found.items()},
        BLOCKS: {name: quantizer.block_amax for name, quantizer in found.items()},
        BIAS: {name: q.bias for name, q in found.items() if isinstance(q, AffineQuantizer)},
    }
    return {
        "version": VERSION,
        "recipe": recipe.as_dict(),
        "quantizers": {n: _facts(q) | _shape_of(q, modules[n.rpartition(".")[0]]) for n, q in found.items()},
        "ranges": {
            name + what: tensor.detach().cpu().clone()
            for what, those in tensors.items()
            for name, tensor in those.items()
            if tensor is not None
        },
    }


def _shape_of(quantizer: Quantizer, module: nn.Module) -> dict[str, list[int]]:
    """Of the whole weight, also where it is sharded."""
    parameter = module._parameters.get(quantizer.slot.leaf) if quantizer.is_weight else None
    return {} if parameter is None else {"shape": list(parameter.shape)}


def _facts(quantizer: Quantizer) -> dict[str, Any]:
    learned = quantizer.amax is not None and quantizer.amax.requires_grad
    return {
        "format": quantizer.format.name,
        "enabled": quantizer.is_enabled,
        "clips": quantizer.clips,
        "learned": learned,
    }


def checked_recipe(state: Any) -> dict[str, Any]:
    """The recipe of a state, as a mapping.

    Raises UserError for what is no state, for one of a newer version, and for one that somebody has spoiled.
    """
    cure = "give what hf_ptq.quantizer_state or hf_ptq.read_state returns"
    if not isinstance(state, Mapping):
        raise UserError(Problem(f"this is no state of quantizers, but a {type(state).__name__}", cure))
    missing = [part for part in _PARTS if part not in state]
    if missing:
        raise UserError(Problem(f"this is no state of quantizers: it lacks {', '.join(missing)}", cure))
    version = state["version"]
    if not isinstance(version, int) or version < 1:
        raise UserError(Problem(f"the state has version {version!r}, versions are whole numbers from 1 on", cure))
    if version > VERSION:
        what = f"the state has version {version}, this hf-ptq reads up to {VERSION}"
        raise UserError(Problem(what, "upgrade hf-ptq"))
    wrong = [part for part in _PARTS[1:] if not isinstance(state[part], Mapping)]
    refuse_if_any(Problem(f"{part} of the state is a {type(state[part]).__name__}, no mapping", cure) for part in wrong)
    refuse_if_any([*_wrong_facts(state["quantizers"]), *_wrong_ranges(state)])
    return dict(state["recipe"])


def _wrong_facts(quantizers: Mapping[str, Any]) -> Iterator[Problem]:
    for name, facts in quantizers.items():
        try:
            _Facts.model_validate(facts)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            yield Problem(f"the state's {name}: {wrong}", "give the state as it was saved")


def _wrong_ranges(state: Mapping[str, Any]) -> Iterator[Problem]:
    for name, tensor in state["ranges"].items():
        what = next((what for what in (BLOCKS, BIAS) if name.endswith(what)), "")
        wrong = ""
        if name.removesuffix(what) not in state["quantizers"]:
            wrong = "belongs to no quantizer of the state"
        elif not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            wrong = f"is no tensor of floating-point numbers, but {tensor!r:.40}"
        elif not bool(tensor.isfinite().all()) or (what != BIAS and bool((tensor < 0).any())):
            wrong = "holds negative numbers, NaN or infinity"
        if wrong:
            yield Problem(f"the state's range {name!r} {wrong}", "give the state as it was saved")


def misfits(state: Mapping[str, Any], model: nn.Module, record: Record) -> list[Problem]:
    """Everything that a state has otherwise than a model with quantizers."""
    own, theirs, modules = quantizers_on(model), state["quantizers"], named(model)
    problems: list[Problem] = []
    for name in theirs.keys() - own.keys():
        where = name.rpartition(".")[0]
        problems.append(Problem(f"the state has {name}, the model has no quantizer there", f"does it have {where}?"))
    for name in own.keys() - theirs.keys():
        what = f"the model has {name}, the state knows nothing of it"
        problems.append(Problem(what, "take the state from such a model"))
    for name in own.keys() & theirs.keys():
        shape = _shape_of(own[name], modules[name.rpartition(".")[0]]).get("shape")
        problems += _tensor_differences(name, own[name], theirs[name], state["ranges"].get(name), shape)
    problems = [*_recipe_differences(state, record.recipe), *sorted(problems, key=str)]
    more = len(problems) - MAX_PROBLEMS
    return [*problems[:MAX_PROBLEMS], *([Problem(f"and {more} more of these")] if more > 0 else [])]


def _recipe_differences(state: Mapping[str, Any], recipe: Recipe) -> Iterator[Problem]:
    theirs, own = state["recipe"], recipe.as_dict()
    for key in ("algorithm", "rules"):
        if theirs.get(key) == own.get(key):
            continue
        shown = f"the state's recipe {theirs.get('name')} is not the model's, {own['name']}: {key}"
        if key == "rules":
            pairs = zip([*theirs[key], None], [*own[key], None], strict=False)
            number, (one, other) = next((i, pair) for i, pair in enumerate(pairs, 1) if pair[0] != pair[1])
            shown = f"{shown} differ from number {number} on, {json.dumps(one)} and {json.dumps(other)}"
        yield Problem(shown, "restore into a model that is not quantized yet, or quantize it with this recipe")


def _tensor_differences(
    name: str, quantizer: Quantizer, facts: Mapping[str, Any], amax: torch.Tensor | None, weight: list[int] | None
) -> Iterator[Problem]:
    if facts["format"] != quantizer.format.name:
        yield Problem(f"{name} has the format {facts['format']} in the state, {quantizer.format.name} in the model")
    elif weight is not None and facts.get("shape", weight) != weight:
        what = f"{name} is of a weight {facts['shape']} in the state, of one {weight} in the model"
        yield Problem(what, "the modules have other sizes")
    elif amax is not None and (shape := _shape(quantizer)) is not None and tuple(amax.shape) != shape:
        what = f"the range of {name} has the shape {list(amax.shape)} in the state, the model needs {list(shape)}"
        yield Problem(what, "the modules have other sizes")


def _shape(quantizer: Quantizer) -> tuple[int, ...] | None:
    """Of its range, None where it has none, or of each block."""
    if not quantizer.needs_range:
        return None
    if quantizer.is_weight and quantizer.format.granularity == "block" and not quantizer.format.has_global_scale:
        return None  # as many as there are blocks
    experts = (quantizer.num_experts,) if quantizer.is_weight and quantizer.num_experts else ()
    return (*experts, *((quantizer.slot.channels,) if quantizer.has_channels else ()))


def give_state(state: Mapping[str, Any], model: nn.Module) -> None:
    """Set ranges and switches; weights of a fused group share one tensor again."""
    shared: dict[str, torch.Tensor] = {}
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    for name, quantizer in quantizers_on(model).items():
        facts = state["quantizers"][name]
        quantizer.is_enabled, quantizer.clips = facts["enabled"], facts["clips"]
        amax = state["ranges"].get(name)
        if amax is not None:
            place = "cpu" if quantizer.format.constant_amax is not None else device
            own = amax.detach().to(place, torch.float32).clone().requires_grad_(facts["learned"])
            is_shared = quantizer.is_weight and quantizer.format.is_shared
            quantizer.amax = shared.setdefault(quantizer.key, own) if is_shared else own
        elif quantizer.format.constant_amax is None:
            quantizer.amax = None
        blocks, bias = (state["ranges"].get(name + what) for what in (BLOCKS, BIAS))
        quantizer.block_amax = None if blocks is None else blocks.to(device, copy=True)
        if isinstance(quantizer, AffineQuantizer):
            quantizer.bias = None if bias is None else bias.to(device, copy=True)
        quantizer.forget_moment()
        quantizer.mode = "quantize"


# --- files -----------------------------------------------------------------------------------------


def save_state(state: Mapping[str, Any], path: str | Path) -> None:
    """Write a state as one safetensors file, with everything that is no tensor as JSON in its header."""
    told = {part: value for part, value in state.items() if part != "ranges"}
    save_file(dict(state["ranges"]), path, {_HEADER: json.dumps(told)})


def read_state(path: str | Path) -> State:
    """The state in a file of `save_state`. Raises UserError where it is none."""
    try:
        with safe_open(path, "pt") as file:
            told = (file.metadata() or {}).get(_HEADER)
            ranges = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise UserError(
            Problem(f"{path} is no file of quantizers: {error}", "give one of hf_ptq.save_state")
        ) from error
    if told is None:
        raise UserError(Problem(f"{path} holds tensors, but no state of quantizers", "give one of hf_ptq.save_state"))
    return {**json.loads(told), "ranges": ranges}
