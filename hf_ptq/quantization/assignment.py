"""From a recipe and a model without weights to a decision for every linear: the assignment.

Pure: names, shapes and rules in; formats, exclusions and complaints out. Everything after this asks the assignment
and no longer the recipe. It costs no memory, so that a recipe is judged before anything is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn
from transformers import PreTrainedModel

from hf_ptq.errors import Problem, UserError
from hf_ptq.model.experts import takes_registry as experts_take_registry
from hf_ptq.model.views import WeightView
from hf_ptq.model.wrappers import named
from hf_ptq.quantization.cache import QuantizedCache, decide_cache
from hf_ptq.quantization.contradictions import says_otherwise
from hf_ptq.quantization.formats.description import FORMATS, NumberFormat
from hf_ptq.quantization.groups import fused_groups
from hf_ptq.quantization.modelopt_recipe import UNTOUCHED
from hf_ptq.quantization.modules import LINEAR as LINEAR_KIND
from hf_ptq.quantization.modules import class_names, kind_of
from hf_ptq.quantization.notices import UNFIT_CURE, gate_warnings, recipe_warnings, unfit_warnings
from hf_ptq.quantization.numerics import BESIDE
from hf_ptq.quantization.places import places_of, stacked_place
from hf_ptq.quantization.recipe import Recipe
from hf_ptq.quantization.rules import LINEAR, Decision, Place, Tensor, numbered, settle

MAX_PROBLEMS = 10


@dataclass(frozen=True)
class QuantizedWeight:
    """A view that is quantized: with which formats, in which fused group, by which rule."""

    view: WeightView
    weight: NumberFormat
    input: NumberFormat | None
    group: str  # fused group or the module itself: members share the global weight scale and the input scale
    rule: str

    @property
    def input_key(self) -> str:
        """Names the activation that this weight is multiplied with: one statistic serves all weights of a key."""
        return self.group

    @property
    def scheme(self) -> tuple[str, str | None]:
        """(weight format, input format)."""
        return self.weight.name, self.input.name if self.input else None


@dataclass(frozen=True)
class LeftAlone:
    """A linear that stays as it is, and why."""

    module: str
    reason: str


@dataclass(frozen=True)
class Assignment:
    """What is quantized with what. `kv` is None where keys and values stay as they are."""

    quantized: tuple[QuantizedWeight, ...]
    left_alone: tuple[LeftAlone, ...]
    kv: QuantizedCache | None
    warnings: tuple[str, ...]

    @property
    def needs_data(self) -> bool:
        """True where some activation's range has to be calibrated."""
        inputs = any(q.input is not None and q.input.needs_data for q in self.quantized)
        return inputs or (self.kv is not None and self.kv.needs_data)

    @cached_property
    def by_module(self) -> dict[str, QuantizedWeight]:
        """Source module name -> the quantized weight that it belongs to; asked for once per tensor, so made once."""
        return {module: q for q in self.quantized for module in q.view.modules}

    @cached_property
    def by_tensor(self) -> dict[str, tuple[QuantizedWeight, ...]]:
        """Source tensor -> the quantized weights that it holds."""
        found: dict[str, tuple[QuantizedWeight, ...]] = {}
        for q in self.quantized:
            for tensor in q.view.tensors:
                found[tensor] = (*found.get(tensor, ()), q)
        return found


def assign(
    recipe: Recipe, model: PreTrainedModel, views: Sequence[WeightView], tied: Mapping[str, str] | None = None
) -> Assignment:
    """Decide every linear of `views`, and the KV cache. `tied`: parameter -> the one whose weight it shares.

    Raises UserError with all reasons: the recipe quantizes nothing, it splits a fused group or the experts of a
    layer, or it asks for experts that cannot be reached.
    """
    modules = named(model)
    wrong: dict[tuple[str | None, ...], Problem] = {}
    places = places_of(views, modules)
    decisions = {view: _decide(recipe, view, places[view], modules[view.owner], wrong) for view in views}
    problems = list(wrong.values())
    tied = tied or {}
    _leave_tied_alone(decisions, tied)
    groups = _groups(views)
    quantized, left, warnings = _apply_shapes(decisions, groups)
    problems += _split_groups(groups, {m for q in quantized for m in q.view.modules}, quantized)
    problems += _split_experts(quantized, views)
    problems += _tied_problems(recipe, tied)
    problems += _opaque_experts(recipe, modules, quantized, {view.parameter for view in views})
    if not quantized and not problems:
        name, asked = type(model).__name__, _tied_warnings(recipe, tied, views, decisions)
        cure = "; ".join([*asked, _reasons(left), f"the names are e.g. {_examples(views)}"])
        problems.append(_cache_alone(recipe) or Problem(f"recipe {recipe.name} quantizes nothing in {name}", cure))
    if problems:
        raise UserError(*list(dict.fromkeys(problems))[:MAX_PROBLEMS])
    cache, cache_warnings = decide_cache(recipe, model, views)
    warnings += [*_tied_warnings(recipe, tied, views, decisions), *cache_warnings]
    warnings += [*recipe_warnings(recipe, modules, views), *gate_warnings(q.view.modules[0] for q in quantized)]
    return Assignment(tuple(quantized), tuple(left), cache, tuple(warnings))


@dataclass(frozen=True)
class _Formats:
    """What the rules give a view."""

    weight: NumberFormat
    input: NumberFormat | None
    rule: str


def _decide(
    recipe: Recipe,
    view: WeightView,
    places: Sequence[Place],
    owner: nn.Module,
    wrong: dict[tuple[str | None, ...], Problem],
) -> _Formats | str:
    """The formats that the rules come to, or the reason why the view is left alone. `places`: of its modules.

    `wrong` gets what cannot be carried out, once for each rule and reason: its first module stands for all.
    """
    found: dict[Tensor, Decision] = {tensor: settle(recipe.rules, tensor, places[0]) for tensor in LINEAR}
    other = _decided_otherwise(recipe, places, found)
    if other is not None:
        what = f"rules decide otherwise for {other.names[0]} than for {view.modules[0]}"
        cure = "servers know all experts of a layer as one: match all of them, or none"
        wrong.setdefault(("experts", *(decision.rule for decision in found.values())), Problem(what, cure))
    refused: dict[Tensor, Decision] = {tensor: decision for tensor, decision in found.items() if decision.reason}
    weight, inputs = found["weight"], found["input"]
    if not (weight.asks or inputs.asks or refused):
        return f"off by {weight.rule}" if weight.rule else "no rule matches"
    if not view.is_stacked and kind_of(owner) is not LINEAR_KIND:
        return f"{type(owner).__name__} is no kind that can be quantized"
    for tensor, decision in refused.items():
        wrong.setdefault((decision.rule, tensor, decision.reason), _impossible(view, tensor, decision))
    if inputs.asks and not weight.asks:
        what = f"{inputs.rule} quantizes the input of {view.modules[0]} and nothing its weight"
        cure = "no server quantizes activations only: give the weight a format too"
        wrong.setdefault((inputs.rule, "input"), Problem(what, cure))
        return "refused"
    if refused or weight.format is None:
        return "refused"
    name = BESIDE.get((weight.format, inputs.format or ""), weight.format)
    return _Formats(FORMATS[name], FORMATS[inputs.format] if inputs.format else None, _label(weight, inputs))


def _decided_otherwise(recipe: Recipe, places: Sequence[Place], first: Mapping[Tensor, Decision]) -> Place | None:
    """An expert that is not to have what the first has; None where all are alike."""
    telling = numbered(recipe.rules)
    said = [rule.says(tensor, places[0]) for rule in telling for tensor in LINEAR]
    for place in places[1:] if telling else ():
        if [rule.says(tensor, place) for rule in telling for tensor in LINEAR] == said:
            continue
        if any(settle(recipe.rules, tensor, place).effect != first[tensor].effect for tensor in LINEAR):
            return place
    return None


def _label(weight: Decision, inputs: Decision) -> str:
    """The rule that decided, or both where ModelOpt's patterns are about one tensor each."""
    if inputs.format is None or inputs.rule == weight.rule:
        return str(weight.rule)
    return f"{weight.rule}, {inputs.rule}"


def _impossible(view: WeightView, tensor: Tensor, decision: Decision) -> Problem:
    cure = "turn it off in the recipe (enable: false), or give it a format that --list shows"
    return Problem(f"{decision.rule} quantizes the {tensor} of {view.modules[0]}: {decision.reason}", cure)


def _leave_tied_alone(decisions: dict[WeightView, _Formats | str], tied: Mapping[str, str]) -> None:
    """A weight that is tied to another one is that other one's."""
    for view, decision in decisions.items():
        if view.parameter in tied and not isinstance(decision, str):
            decisions[view] = f"tied to {tied[view.parameter]}"


def _tied_warnings(
    recipe: Recipe, tied: Mapping[str, str], views: Sequence[WeightView], decisions: Mapping[WeightView, _Formats | str]
) -> list[str]:
    """Tied weights, stored or not, that the recipe asks for."""
    asked = [v.modules[0] for v, d in decisions.items() if isinstance(d, str) and d.startswith("tied to ")]
    stored = {view.parameter for view in views}
    for parameter in tied:
        name = parameter.removesuffix(".weight")
        if parameter not in stored and settle(recipe.rules, "weight", Place((name,))).asks:
            asked.append(name)
    return [
        f"{name} shares the embedding's weight and is left unquantized, though the recipe asks for it" for name in asked
    ]


def _tied_problems(recipe: Recipe, tied: Mapping[str, str]) -> list[Problem]:
    """Heads that share the embedding's weight, and that a rule asks for by name."""
    found = []
    for parameter, shared in tied.items():
        name = parameter.removesuffix(".weight")
        rule = settle(recipe.rules, "weight", Place((name,)))
        if rule.asks and name.rpartition(".")[2] in str(rule.rule):
            what = f"{name} shares its weight with {shared}, so it cannot be quantized by itself ({rule.rule})"
            found.append(Problem(what, f"leave it out by a last rule: pattern: {name}, enable: false"))
    return found


def _groups(views: Sequence[WeightView]) -> dict[str, tuple[str, ...]]:
    """Fused groups over the source's names, experts included (one group an expert)."""
    return fused_groups(module for view in views for module in view.modules)


def _apply_shapes(
    decisions: Mapping[WeightView, _Formats | str], groups: Mapping[str, tuple[str, ...]]
) -> tuple[list[QuantizedWeight], list[LeftAlone], list[str]]:
    """Views whose shape a format cannot take are left alone, with a warning for each kind and reason."""
    group_of = {member: group for group, members in groups.items() for member in members}
    quantized: list[QuantizedWeight] = []
    left: list[LeftAlone] = []
    told: list[tuple[str, str, str]] = []
    unfit = _unfit(decisions)
    for view, decision in decisions.items():
        reason = (
            decision if isinstance(decision, str) else unfit.get(view.stack if view.is_stacked else view.modules[0])
        )
        if reason is not None or isinstance(decision, str):
            left += [LeftAlone(module, str(reason)) for module in view.modules]
            if not isinstance(decision, str):
                place, kind = (view.stack, "experts") if view.is_stacked else (view.modules[0], view.leaf)
                told.append((place, kind, str(reason)))
            continue
        weight = decision.weight
        group = _group_name(view, group_of)
        quantized.append(QuantizedWeight(view, weight, decision.input, group, decision.rule))
    return quantized, left, unfit_warnings(told, UNFIT_CURE)


def _unfit(decisions: Mapping[WeightView, _Formats | str]) -> dict[str, str]:
    """Module, or all experts of a layer -> why its format cannot take it."""
    found: dict[str, str] = {}
    for view, decision in decisions.items():
        if isinstance(decision, str):
            continue
        place, of = (view.stack, f" of {view.leaf}") if view.is_stacked else (view.modules[0], "")
        weight, sizes = decision.weight, zip(("outputs", "inputs"), view.shape, strict=True)
        for (what, size), multiple in zip(sizes, (weight.output_multiple, weight.input_multiple), strict=True):
            if size % multiple:
                found[place] = f"{size} {what}{of} are no multiple of {multiple}, as {weight.name} needs"
    return found


def _group_name(view: WeightView, group_of: Mapping[str, str]) -> str:
    """The fused group of a view, without the expert's number for stacked ones: ...experts.gate_up_proj."""
    group = group_of.get(view.modules[0], view.modules[0])
    return f"{view.stack}.{group.rpartition('.')[2]}" if view.is_stacked else group


def _split_groups(
    groups: Mapping[str, tuple[str, ...]], inside: set[str], quantized: Sequence[QuantizedWeight]
) -> list[Problem]:
    """Fused groups of which only some members are quantized, or not all alike."""
    schemes = {module: q.scheme for q in quantized for module in q.view.modules}
    problems = []
    for members in groups.values():
        present = [m for m in members if m in inside]
        if present and (len(present) < len(members) or len({schemes[m] for m in present}) > 1):
            shown = ", ".join(
                f"{m}: {'/'.join(map(str, schemes[m])) if m in schemes else 'unquantized'}" for m in members
            )
            problems.append(
                Problem(
                    f"servers fuse these, so they need one format: {shown}",
                    "change the recipe so that all members of the group match the same rule",
                )
            )
    return problems[:5]


def _split_experts(quantized: Sequence[QuantizedWeight], views: Sequence[WeightView]) -> list[Problem]:
    """Layers whose experts are quantized in part, or not all alike; servers know one scheme for all of them."""
    schemes: dict[str, dict[str, str]] = {view.stack: {} for view in views if view.is_stacked}
    by_view = {q.view: q.scheme for q in quantized}
    for view in views:
        if view.is_stacked:
            schemes[view.stack][view.leaf] = "/".join(map(str, by_view[view])) if view in by_view else "unquantized"
    return [
        Problem(
            f"the experts of {stack} need one format: "
            + ", ".join(f"{leaf}: {scheme}" for leaf, scheme in kinds.items()),
            "change the recipe so that all projections of the experts match the same rule",
        )
        for stack, kinds in schemes.items()
        if len(set(kinds.values())) > 1
    ]


def _cache_alone(recipe: Recipe) -> Problem | None:
    """What is wrong with a recipe for keys and values alone; None for others. The rules before all entries aside."""
    said = says_otherwise(recipe.rules, ())
    if not said or any(rule.gives_weights for rule in recipe.rules if rule not in UNTOUCHED):
        return None
    what = f"recipe {recipe.name} gives no weight a format, only keys and values: {said}"
    cure = (
        "servers know a checkpoint by the format of its weights: give some weights one, or serve the model as it is "
        "with an FP8 cache (vllm serve MODEL --kv-cache-dtype fp8), which needs no export"
    )
    return Problem(what, cure)


def _opaque_experts(
    recipe: Recipe, modules: Mapping[str, nn.Module], quantized: Sequence[QuantizedWeight], viewed: set[str]
) -> list[Problem]:
    """Experts that the recipe wants quantized and that we cannot reach, one problem a class of module.

    Those that do not look their forward up by name (their inputs stay unseen), and those whose weights the source
    stores in one tensor for all experts.
    """
    found: dict[str, Problem] = {}
    for weight in quantized:
        owner = modules[weight.view.owner]
        if weight.view.is_stacked and weight.input is not None and not experts_take_registry(owner):
            what = f"{type(owner).__name__} ({weight.view.owner}) runs its experts by itself; their inputs stay unseen"
            cure = "use a weight-only recipe (--qformat w4a16_nvfp4), or leave the experts out by a rule"
            found.setdefault(type(owner).__name__, Problem(what, cure))
    for name, module in modules.items():
        for leaf, parameter in module._parameters.items():
            if parameter is None or parameter.dim() != 3 or f"{name}.{leaf}" in viewed or isinstance(module, nn.Conv1d):
                continue
            if parameter.shape[0] == 1:  # a token or the positions of a vision model
                continue
            place = stacked_place((f"{name}.{leaf}",), f"{name}.{leaf}", 0, class_names(module))
            if settle(recipe.rules, "weight", place).asks:
                what = f"{type(module).__name__} ({name}.{leaf}): the source holds all experts in one tensor"
                cure = "this layout is not built yet; leave the experts out by a rule (enable: false)"
                found.setdefault(type(module).__name__, Problem(what, cure))
    return list(found.values())


def _reasons(left: Sequence[LeftAlone]) -> str:
    """Why linears were left alone, the most frequent reasons first."""
    counts = Counter(alone.reason for alone in left).most_common(3)
    return "; ".join(f"{count} of {len(left)} weights: {reason}" for reason, count in counts)


def _examples(views: Sequence[WeightView]) -> str:
    leaves = Counter(view.leaf for view in views)
    return ", ".join(next(v.modules[0] for v in views if v.leaf == leaf) for leaf in list(leaves)[:4])
