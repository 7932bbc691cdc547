"""From a recipe and a model without weights to a decision for every linear: the assignment.

Pure: names, shapes and rules in; formats, exclusions and complaints out. Everything after this asks the assignment
and no longer the recipe. It costs no memory, so that a recipe is judged before anything is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from torch import nn
from transformers import PreTrainedModel

from hf_ptq.errors import Problem, UserError
from hf_ptq.model.experts import takes_registry as experts_take_registry
from hf_ptq.model.views import WeightView
from hf_ptq.model.wrappers import named
from hf_ptq.quantization.cache import QuantizedCache, decide_cache
from hf_ptq.quantization.formats.description import FORMATS, NumberFormat
from hf_ptq.quantization.groups import fused_groups
from hf_ptq.quantization.modules import LINEAR, class_names, kind_of
from hf_ptq.quantization.recipe import Recipe, Rule

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


def assign(
    recipe: Recipe, model: PreTrainedModel, views: Sequence[WeightView], tied: Mapping[str, str] | None = None
) -> Assignment:
    """Decide every linear of `views`, and the KV cache. `tied`: parameter -> the one whose weight it shares.

    Raises UserError with all reasons: the recipe quantizes nothing, it splits a fused group or the experts of a
    layer, or it asks for experts that cannot be reached.
    """
    modules = named(model)
    problems: list[Problem] = []
    decisions = {view: _decide(recipe, view, modules, problems) for view in views}
    tied = tied or {}
    _leave_tied_alone(decisions, tied)
    groups = _groups(views)
    quantized, left, warnings = _apply_shapes(decisions, groups)
    problems += _split_groups(groups, {m for q in quantized for m in q.view.modules}, quantized)
    problems += _split_experts(quantized, views)
    problems += _opaque_experts(recipe, modules, quantized, {view.parameter for view in views})
    if not quantized and not problems:
        what = f"recipe {recipe.name} quantizes nothing in {type(model).__name__}"
        asked = _tied_warnings(recipe, tied, views, decisions)
        cure = "; ".join([*asked, _reasons(left), f"the names are e.g. {_examples(views)}"])
        problems.append(Problem(what, cure))
    if problems:
        raise UserError(*list(dict.fromkeys(problems))[:MAX_PROBLEMS])
    cache, cache_warnings = decide_cache(recipe, model, views)
    warnings += [*_tied_warnings(recipe, tied, views, decisions), *cache_warnings, *_unmatched(recipe, modules, views)]
    return Assignment(tuple(quantized), tuple(left), cache, tuple(warnings))


@dataclass(frozen=True)
class _Formats:
    """What the last rule that matches a view gives it."""

    weight: NumberFormat
    input: NumberFormat | None
    rule: str


def _decide(
    recipe: Recipe, view: WeightView, modules: Mapping[str, nn.Module], problems: list[Problem]
) -> _Formats | str:
    """The formats of the last rule that matches, or the reason why the view is left alone."""
    owner = modules[view.owner]
    own = _own_names(view)
    found = _last_match(recipe, (view.modules[0], *own), owner)
    if view.is_stacked:
        others = [m for m in view.modules[1:] if not _same(_last_match(recipe, (m, *own), owner), found)]
        if others:
            what = f"rules decide otherwise for {others[0]} than for {view.modules[0]}"
            problems.append(Problem(what, "servers know all experts of a layer as one: match all of them, or none"))
    if found is None:
        return "no rule matches"
    rule, pattern = found
    classes = [name for name in class_names(owner) if name in rule.parent_class]
    origin = pattern + (f" in {classes[0]}" if classes else "")
    if rule.weight is None:
        return f"off by {origin}"
    if not view.is_stacked and kind_of(owner) is not LINEAR:
        return f"{type(owner).__name__} is no kind that can be quantized"
    return _Formats(FORMATS[rule.weight], FORMATS[rule.input] if rule.input else None, origin)


def _last_match(recipe: Recipe, names: Sequence[str], owner: nn.Module) -> tuple[Rule, str] | None:
    """The last rule about linears that matches one of the names, and its pattern."""
    for rule in reversed(recipe.rules):
        pattern = _matching_pattern(rule, names, owner) if rule.decides_linears else None
        if pattern is not None:
            return rule, pattern
    return None


def _same(one: tuple[Rule, str] | None, other: tuple[Rule, str] | None) -> bool:
    """Whether two matches give the same formats."""
    if one is None or other is None:
        return one is other
    return (one[0].weight, one[0].input) == (other[0].weight, other[0].input)


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
        deciding = [r for r in recipe.rules if r.decides_linears and any(fnmatchcase(name, p) for p in r.pattern)]
        if parameter not in stored and deciding and deciding[-1].weight is not None:
            asked.append(name)
    return [
        f"{name} shares the embedding's weight and is left unquantized, though the recipe asks for it" for name in asked
    ]


def _own_names(view: WeightView) -> tuple[str, ...]:
    """The model's names of a view's modules: of the linear, or of the stacked projection."""
    own = view.parameter.removesuffix(".weight")
    return (own, f"{view.owner}.{view.leaf}") if view.is_stacked else (own,)


def _names(view: WeightView) -> tuple[str, ...]:
    """What patterns are compared with: the source's names and the model's own."""
    return (*view.modules, *_own_names(view))


def _matching_pattern(rule: Rule, names: Sequence[str], owner: nn.Module) -> str | None:
    if rule.parent_class and not set(rule.parent_class) & set(class_names(owner)):
        return None
    return next((p for p in rule.pattern if any(fnmatchcase(name, p) for name in names)), None)


def _groups(views: Sequence[WeightView]) -> dict[str, tuple[str, ...]]:
    """Fused groups over the source's names, experts included (one group an expert)."""
    return fused_groups(module for view in views for module in view.modules)


def _apply_shapes(
    decisions: Mapping[WeightView, _Formats | str], groups: Mapping[str, tuple[str, ...]]
) -> tuple[list[QuantizedWeight], list[LeftAlone], list[str]]:
    """Views whose inputs a format cannot take are left alone, with a warning."""
    group_of = {member: group for group, members in groups.items() for member in members}
    quantized: list[QuantizedWeight] = []
    left: list[LeftAlone] = []
    warnings: list[str] = []
    unfit = _unfit(decisions)
    for view, decision in decisions.items():
        reason = (
            decision if isinstance(decision, str) else unfit.get(view.stack if view.is_stacked else view.modules[0])
        )
        if reason is not None or isinstance(decision, str):
            left += [LeftAlone(module, str(reason)) for module in view.modules]
            if not isinstance(decision, str):
                warnings.append(f"{view.stack if view.is_stacked else view.modules[0]} is left unquantized: {reason}")
            continue
        weight = decision.weight
        group = _group_name(view, group_of)
        quantized.append(QuantizedWeight(view, weight, decision.input, group, decision.rule))
    return quantized, left, warnings


def _unfit(decisions: Mapping[WeightView, _Formats | str]) -> dict[str, str]:
    """Module, or all experts of a layer -> why its format cannot take it."""
    found: dict[str, str] = {}
    for view, decision in decisions.items():
        if not isinstance(decision, str) and view.shape[1] % decision.weight.input_multiple:
            place, of = (view.stack, f" of {view.leaf}") if view.is_stacked else (view.modules[0], "")
            multiple = f"{decision.weight.input_multiple}, as {decision.weight.name} needs"
            found[place] = f"{view.shape[1]} inputs{of} are no multiple of {multiple}"
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
            deciding = [
                r for r in recipe.rules if r.decides_linears and _matching_pattern(r, (f"{name}.{leaf}",), module)
            ]
            if deciding and deciding[-1].weight is not None:
                what = f"{type(module).__name__} ({name}.{leaf}): the source holds all experts in one tensor"
                cure = "this layout is not built yet; leave the experts out by a rule (enable: false)"
                found.setdefault(type(module).__name__, Problem(what, cure))
    return list(found.values())


def _unmatched(recipe: Recipe, modules: Mapping[str, nn.Module], views: Sequence[WeightView]) -> list[str]:
    """Patterns of the recipe that match no module, unless their rule is optional."""
    names = {name for view in views for name in _names(view)} | set(modules)
    return [
        f"recipe {recipe.name}: pattern {pattern!r} matches no module"
        for rule in recipe.rules
        if not rule.optional
        for pattern in rule.pattern
        if not any(fnmatchcase(name, pattern) for name in names)
    ]


def _reasons(left: Sequence[LeftAlone]) -> str:
    """Why linears were left alone, the most frequent reasons first."""
    counts = Counter(alone.reason for alone in left).most_common(3)
    return "; ".join(f"{count} of {len(left)} weights: {reason}" for reason, count in counts)


def _examples(views: Sequence[WeightView]) -> str:
    leaves = Counter(view.leaf for view in views)
    return ", ".join(next(v.modules[0] for v in views if v.leaf == leaf) for leaf in list(leaves)[:4])
