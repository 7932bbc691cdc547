"""The library under the command: quantize a torch model in memory, train it, save and restore what was measured.

    model = hf_ptq.quantize(model, "nvfp4", lambda m: hf_ptq.calibration_loop(m, loader))

Modules keep their class, their forward and their weights; they hold quantizers, which round inputs and weights during
the forward (quantization/attach.py). A transformers model is quantized as the command does it: the same rules, fused
groups and KV cache, so that `hf_ptq.export` writes the same checkpoint. Of any other model, every module of a
registered kind can be quantized. Everything here takes the model as it stands, wrapped or not. Over several ranks all
of them make the same calls; ranges of inputs are the largest of all ranks.

Training goes through the quantizers (quantization/gradients.py). Ranges stay as calibrated unless `calibrate` is called
again or they are learned (`learn_ranges`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from hf_ptq.data.loader import evaluating
from hf_ptq.distributed.agreement import reduce_over_ranks
from hf_ptq.distributed.launch import read_launch
from hf_ptq.distributed.process_group import DistributedState
from hf_ptq.errors import Problem, RunError, UserError, refuse_if_any
from hf_ptq.model.build import describe_model
from hf_ptq.model.experts import INPUT_QUANTIZER, use_our_experts
from hf_ptq.model.sharding import expert_parallel_problem, full_of
from hf_ptq.model.views import weight_views
from hf_ptq.model.wrappers import named, named_tensors, unwrapped
from hf_ptq.quantization.algorithms import ALGORITHMS
from hf_ptq.quantization.apply import attach_quantizers, attach_weight_quantizers, set_mode
from hf_ptq.quantization.assignment import Assignment, QuantizedWeight, assign
from hf_ptq.quantization.attach import detach, quantizers_on, weight_quantizer_of
from hf_ptq.quantization.calibration import begin, end
from hf_ptq.quantization.plain import PlainTensor, assign_plain, attach_plain, plain_matrix, plain_weight
from hf_ptq.quantization.quantizer import Quantizer
from hf_ptq.quantization.recipe import Recipe, load_recipe
from hf_ptq.quantization.state import (
    Record,
    State,
    checked_recipe,
    give_state,
    keep_record,
    misfits,
    needs_record,
    record_of,
    take_state,
    whole_record_of,
)
from hf_ptq.quantization.summary import summarize
from hf_ptq.wording import in_own_words

Model = TypeVar("Model", bound=nn.Module)
ForwardLoop = Callable[[Any], object]
RecipeLike = str | Path | Mapping[str, Any] | Recipe
_PASS_A_LOOP = "pass forward_loop, a function that runs calibration data through the model"


@in_own_words
def quantize(
    model: Model,
    recipe: RecipeLike,
    forward_loop: ForwardLoop | None = None,
    *,
    kv_cache_qformat: str | None = None,
    clips_gradients: bool = True,
) -> Model:
    """Give the modules of `model` quantizers, calibrate them and switch them on; returns the model.

    `recipe`: a preset, a YAML file, or the same as a mapping. `forward_loop(model)` runs the calibration data; it is
    needed where inputs have static ranges. `kv_cache_qformat`: as the option, for transformers models.
    `clips_gradients`: no gradient for values outside of their range (False: it passes). A model that was quantized
    before starts anew. Raises UserError, with the model as it was, where the recipe cannot be carried out, and
    RunError, with the model unquantized, where calibration fails.
    """
    _check_loop(forward_loop)
    refuse_if_any(_without_values(model))
    wanted = _decide(model, _recipe(recipe, unwrapped(model), kv_cache_qformat))
    if wanted.needs_data and forward_loop is None:
        what = f"recipe {wanted.recipe.name} gives inputs static ranges, and there is no data to measure them"
        raise UserError(Problem(what, _PASS_A_LOOP))
    with ExitStack() as undo:
        undo.callback(_forget, model)
        for quantizer in _attach(model, wanted).values():
            quantizer.clips = clips_gradients
        calibrate(model, forward_loop)
        undo.pop_all()
    return model


@in_own_words
@torch.no_grad()
def calibrate(model: nn.Module, forward_loop: ForwardLoop | None = None) -> None:
    """Measure all ranges anew: of weights as they are now, and of the inputs that `forward_loop(model)` shows.

    The loop runs in eval mode, unquantized and without gradients. Raises UserError without a loop where one is needed,
    RunError where an input was never seen, or an input or a weight held NaN or infinity; warns of inputs that were
    always zero. Whatever fails, the loop included, leaves the ranges and the switches as they were.
    """
    record, found = needs_record(model), quantizers_on(model)
    _check_loop(forward_loop)
    inputs = {
        name.removesuffix(f".{INPUT_QUANTIZER}"): quantizer
        for name, quantizer in found.items()
        if not quantizer.is_weight and quantizer.is_enabled and quantizer.format.needs_data
    }
    if inputs and forward_loop is None:
        what = f"{len(inputs)} inputs need data for their ranges, such as {next(iter(inputs))}"
        raise UserError(Problem(what, _PASS_A_LOOP))
    before = {quantizer: quantizer.memory() for quantizer in found.values()}
    with ExitStack() as undo:
        undo.callback(_put_back, before)
        set_mode(found.values(), "off")
        _measure_weights(model, record)
        if inputs and forward_loop is not None:
            _measure_inputs(model, record, inputs, forward_loop)
        undo.pop_all()
    set_mode(found.values(), "quantize")


def _put_back(before: Mapping[Quantizer, dict[str, Any]]) -> None:
    for quantizer, memory in before.items():
        quantizer.remember(memory)


def _measure_inputs(
    model: nn.Module, record: Record, inputs: Mapping[str, Quantizer], forward_loop: ForwardLoop
) -> None:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    statistics = begin(record.recipe.algorithm, inputs, device)
    with evaluating(model):
        forward_loop(model)
    set_mode(inputs.values(), "off")
    statistics.commit()
    state = current_state(device)
    statistics.reduce(lambda flat, reduction, _group: reduce_over_ranks(state, flat, reduction))
    for text in end(record.recipe.algorithm, inputs, statistics):
        warnings.warn(text, stacklevel=5)  # the caller of `calibrate`, which is decorated twice


def _check_loop(forward_loop: ForwardLoop | None) -> None:
    if forward_loop is not None and not callable(forward_loop):
        cure = "for a loader of batches: lambda model: hf_ptq.calibration_loop(model, loader)"
        raise UserError(Problem(f"forward_loop is a {type(forward_loop).__name__}, and no function", cure))


def _without_values(model: nn.Module) -> Iterator[Problem]:
    meta = [name for name, tensor in named_tensors(model).items() if tensor.is_meta]
    if meta:
        what = f"{len(meta)} tensors of the model are on the meta device, such as {meta[0]}"
        yield Problem(what, "load the weights before quantizing; restore_quantizers works on such a model")


def current_state(device: torch.device) -> DistributedState:
    """Where this process stands in the group that the script has set up; alone, if it has none."""
    if not dist.is_initialized():
        return DistributedState(0, 1, device)
    return DistributedState(dist.get_rank(), dist.get_world_size(), device, read_launch())


def quantizers(model: nn.Module) -> dict[str, Quantizer]:
    """Name -> quantizer, in the order of the modules; `layer1.0.conv1.weight_quantizer`, without wrappers' prefixes."""
    record_of(model)
    return quantizers_on(model)


def summary(model: nn.Module, verbose: bool = False) -> str:
    """A line for each kind of quantized module with its formats, or, `verbose`, for each module with its ranges."""
    record_of(model)
    return summarize(model, verbose)


def enable(model: nn.Module, pattern: str) -> list[str]:
    """Switch on the quantizers whose name, or whose module's name, matches the glob; returns their names.

    One whose range was never measured is measured by the next `calibrate`, which has to come before the next forward.
    Raises UserError where nothing matches.
    """
    return _switch(model, pattern, True)


def disable(model: nn.Module, pattern: str) -> list[str]:
    """Switch quantizers off; as `enable`."""
    return _switch(model, pattern, False)


def _switch(model: nn.Module, pattern: str, is_enabled: bool) -> list[str]:
    found = quantizers(model)
    chosen = [n for n in found if fnmatchcase(n, pattern) or fnmatchcase(n.rpartition(".")[0], pattern)]
    if not chosen:
        what = f"{pattern!r} matches no quantizer and no module that holds one"
        raise UserError(Problem(what, f"the names are e.g. {', '.join(list(found)[:4]) or 'none: quantize first'}"))
    for name in chosen:
        found[name].is_enabled = is_enabled
    return chosen


# --- state -----------------------------------------------------------------------------------------


def quantizer_state(model: nn.Module) -> State:
    """Everything about the quantizers as plain data: strings, numbers and CPU tensors; the model's weights apart.

    With `model_state(model)` it is all there is to save; `save_state` writes it as a safetensors file.
    """
    return take_state(model)


def model_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state_dict, without prefixes of wrappers and, from FSDP2, whole; every rank calls it."""
    return {name: full_of(tensor.detach()) for name, tensor in named_tensors(model, every_name=True).items()}


@in_own_words
def restore_quantizers(model: Model, state: Mapping[str, Any]) -> Model:
    """Give the model the quantizers of a state, ranges included; returns the model.

    It may be quantized already, by the same recipe. Raises UserError, with the model as it was, telling everything that
    does not fit: missing modules, other shapes, another recipe, a newer version.
    """
    told = checked_recipe(state)
    record = whole_record_of(model)
    with ExitStack() as undo:
        if record is None:
            undo.callback(_forget, model)
            is_plain = not isinstance(unwrapped(model), PreTrainedModel)
            _attach(model, _decide(model, load_recipe(told, is_plain)))
            record = needs_record(model)
        refuse_if_any(misfits(state, model, record))
        undo.pop_all()
    give_state(state, model)
    return model


# --- training --------------------------------------------------------------------------------------


def learn_ranges(model: nn.Module, pattern: str = "*") -> list[torch.Tensor]:
    """Let the ranges that match be trained; returns them as leaf tensors for an optimizer.

    One that is trained already stays the tensor that it is; a fused group has one. They are no parameters of the
    model: wrappers do not see them, so over several ranks call `average_range_gradients(model)` before each step of the
    optimizer. `calibrate`, and moving the model to another device, make new ranges: call this again, for a new
    optimizer.
    """
    learned: dict[str, torch.Tensor] = {}
    for name, quantizer in quantizers(model).items():
        amax = quantizer.amax
        if amax is not None and quantizer.is_enabled and quantizer.needs_range and fnmatchcase(name, pattern):
            shared = quantizer.key if quantizer.is_weight and quantizer.format.is_shared else name
            if shared not in learned:
                learned[shared] = amax if amax.requires_grad else amax.detach().clone().requires_grad_()
            quantizer.amax = learned[shared]
    for quantizer in quantizers(model).values():
        if quantizer.is_weight and quantizer.format.is_shared and quantizer.key in learned:
            quantizer.amax = learned[quantizer.key]
    return list(learned.values())


def average_range_gradients(model: nn.Module) -> None:
    """Average the gradients of learned ranges over the ranks, in one collective."""
    found = {id(q.amax): q.amax for q in quantizers(model).values() if q.amax is not None and q.amax.requires_grad}
    if not found or not dist.is_initialized():
        return
    gradients = [torch.zeros_like(amax) if amax.grad is None else amax.grad for amax in found.values()]
    flat = torch.cat([gradient.flatten() for gradient in gradients]) / dist.get_world_size()
    dist.all_reduce(flat)
    sizes = [amax.numel() for amax in found.values()]
    for amax, part in zip(found.values(), flat.split(sizes), strict=True):
        amax.grad = part.view(amax.shape).clone()


# --- attaching -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wanted:
    """What a recipe says about a model: an assignment for transformers models, tensors for others."""

    recipe: Recipe
    assignment: Assignment | None
    tensors: tuple[PlainTensor, ...] = ()

    @property
    def needs_data(self) -> bool:
        if self.assignment is not None:
            return self.assignment.needs_data
        return any(t.slot.role == "input" and t.is_enabled and t.format.needs_data for t in self.tensors)


def _recipe(recipe: RecipeLike, root: nn.Module, kv: str | None) -> Recipe:
    is_plain = not isinstance(root, PreTrainedModel)
    if is_plain and kv is not None:
        what = f"kv_cache_qformat={kv!r}: a {type(root).__name__} is no transformers model with a known KV cache"
        raise UserError(Problem(what, "leave kv_cache_qformat out"))
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe if isinstance(recipe, Mapping) else str(recipe), is_plain)
    return recipe if is_plain else recipe.with_kv(kv)


def _decide(model: nn.Module, recipe: Recipe) -> _Wanted:
    root = unwrapped(model)
    if not isinstance(root, PreTrainedModel):
        tensors, told = assign_plain(recipe, model)
        wanted = _Wanted(recipe, None, tuple(tensors))
    else:
        refuse_if_any(expert_parallel_problem(root))
        meta, entries = describe_model(root)
        views = weight_views(meta.placements, entries, meta.stacking, meta.fused)
        assignment = assign(recipe, root, views, dict(root.all_tied_weights_keys))
        refuse_if_any(_of_one_tensor(assignment))
        told, wanted = assignment.warnings, _Wanted(recipe, assignment)
    for text in told:
        warnings.warn(text, stacklevel=4)  # the caller of the decorated function
    return wanted


def _of_one_tensor(assignment: Assignment) -> Iterator[Problem]:
    for weight in assignment.quantized:
        if weight.view.sources:
            what = f"{weight.view.parameter} holds experts that the hub has in one tensor too"
            yield Problem(what, "quantize such a model by the command, or leave its experts out by a rule")
            return


def _attach(model: nn.Module, wanted: _Wanted) -> dict[str, Quantizer]:
    _forget(model)
    root = unwrapped(model)
    if wanted.assignment is None:
        attach_plain(model, list(wanted.tensors))
    else:
        assert isinstance(root, PreTrainedModel)
        use_our_experts(root, "grouped_mm")
        attach_quantizers(root, wanted.assignment)
        attach_weight_quantizers(root, wanted.assignment)
    found = quantizers_on(model)
    formats = {name: quantizer.format.name for name, quantizer in found.items()}
    keep_record(model, Record(wanted.recipe, wanted.assignment, formats))
    return found


def _forget(model: nn.Module) -> None:
    detach(model)
    keep_record(model, None)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # compiled code does not look whether modules have got hooks or lost them


def _measure_weights(model: nn.Module, record: Record) -> None:
    """Set the ranges of all weights; of a fused group together. Collective where they are sharded."""
    tensors = named_tensors(model)
    algorithm = record.recipe.algorithm
    finite: dict[str, torch.Tensor] = {}
    for members in _fused_weights(model, record):
        whole = {p: full_of(tensors[p]).detach() for p in dict.fromkeys(q.view.parameter for q in members)}
        finite |= {name: torch.stack(tensor.aminmax()).isfinite().all() for name, tensor in whole.items()}
        matrices = {
            q: plain_matrix(whole[q.view.parameter], own)
            if record.assignment is None
            else q.view.of(whole[q.view.parameter])
            for q, own in members.items()
        }
        shared: dict[str, torch.Tensor] = {}
        for weight, found in ALGORITHMS[algorithm.method].weight_ranges(algorithm, matrices).items():
            quantizer, is_shared = members[weight], weight.weight.is_shared
            quantizer.amax = shared.setdefault(quantizer.key, found.amax) if is_shared else found.amax
            quantizer.block_amax = found.block_amax
    damaged = [name for name, is_finite in finite.items() if not is_finite]
    if damaged:
        raise RunError(*(Problem(f"{name} holds NaN or infinity", "load or train the model again") for name in damaged))


def _fused_weights(model: nn.Module, record: Record) -> Iterator[dict[QuantizedWeight, Quantizer]]:
    """The quantized weights that share ranges; in models that stay in PyTorch each is alone."""
    modules = named(model)
    if record.assignment is None:
        for name, quantizer in quantizers_on(model).items():
            if quantizer.is_weight:
                yield {plain_weight(name, quantizer, modules[name.rpartition(".")[0]]): quantizer}
        return
    groups: dict[str, list[QuantizedWeight]] = {}
    for weight in record.assignment.quantized:
        groups.setdefault(weight.group, []).append(weight)
    for members in groups.values():
        yield {weight: weight_quantizer_of(modules[weight.view.owner], weight) for weight in members}
