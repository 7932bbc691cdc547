"""From a recipe and a model without weights to a decision for every linear: the assignment.

Pure: names, shapes and rules in; formats, exclusions and complaints out. Everything after this asks the assignment
and no longer the recipe. It costs no memory, so that a recipe is judged before anything is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from hf_ptq.errors import Problem, UserError
from hf_ptq.model.attention import attention_modules, takes_registry
from hf_ptq.model.experts import takes_registry as experts_take_registry
from hf_ptq.model.views import WeightView
from hf_ptq.quantization.formats.description import FORMATS, NumberFormat
from hf_ptq.quantization.groups import fused_groups
from hf_ptq.quantization.modules import class_names, kind_of
from hf_ptq.quantization.recipe import Recipe, Rule


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
class QuantizedCache:
    """The KV cache: the formats of keys and values, and what multi-head latent attention is calibrated on.

    `layers`: the model's name of each attention module -> the source's.
    """

    k: NumberFormat
    v: NumberFormat
    mla: str
    layers: dict[str, str]

    @property
    def needs_data(self) -> bool:
        """True where ranges have to be calibrated, and scales are stored."""
        return self.k.needs_data or self.v.needs_data


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

    @property
    def by_module(self) -> dict[str, QuantizedWeight]:
        """Source module name -> the quantized weight that it belongs to."""
        return {module: q for q in self.quantized for module in q.view.modules}


def assign(recipe: Recipe, model: nn.Module, views: Sequence[WeightView]) -> Assignment:
    """Decide every linear of `views`.

    Raises UserError with all reasons: the recipe quantizes nothing, it splits a fused group, or a shape that a
    format cannot take splits one.
    """
    modules = dict(model.named_modules())
    decisions = {view: _decide(recipe, view, modules) for view in views}
    groups = _groups(views)
    quantized, left, warnings = _apply_shapes(decisions, groups)
    problems = _split_groups(groups, {m for q in quantized for m in q.view.modules}, quantized)
    problems += _opaque_experts(recipe, modules, quantized, {view.parameter for view in views})
    if not quantized and not problems:
        problems.append(
            Problem(
                f"recipe {recipe.name} quantizes nothing in {type(model).__name__}",
                f"{_reasons(left)}; the names are e.g. {_examples(views)}",
            )
        )
    if problems:
        raise UserError(*problems)
    kv, kv_warnings = _decide_kv(recipe, model, views)
    warnings += [*kv_warnings, *_unmatched(recipe, modules, views)]
    return Assignment(tuple(quantized), tuple(left), kv, tuple(warnings))


@dataclass(frozen=True)
class _Formats:
    """What the last rule that matches a view gives it."""

    weight: NumberFormat
    input: NumberFormat | None
    rule: str


def _decide(recipe: Recipe, view: WeightView, modules: Mapping[str, nn.Module]) -> _Formats | str:
    """The formats of the last rule that matches, or the reason why the view is left alone."""
    owner = modules[view.owner]
    names = _names(view)
    found: tuple[Rule, str] | None = None
    for rule in recipe.rules:
        pattern = _matching_pattern(rule, names, owner)
        if rule.decides_linears and pattern is not None:
            found = rule, pattern
    if found is None:
        return "no rule matches"
    rule, pattern = found
    classes = [name for name in class_names(owner) if name in rule.parent_class]
    origin = pattern + (f" in {classes[0]}" if classes else "")
    if rule.weight is None:
        return f"off by {origin}"
    if not view.is_stacked and kind_of(owner) is None:
        return f"{type(owner).__name__} is no kind that can be quantized"
    return _Formats(FORMATS[rule.weight], FORMATS[rule.input] if rule.input else None, origin)


def _names(view: WeightView) -> tuple[str, ...]:
    """What patterns are compared with: the source's names and the model's own."""
    own = view.parameter.removesuffix(".weight")
    return (*view.modules, own, *((f"{view.owner}.{view.leaf}",) if view.is_stacked else ()))


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
    for view, decision in decisions.items():
        if isinstance(decision, str):
            left += [LeftAlone(module, decision) for module in view.modules]
            continue
        weight = decision.weight
        if view.shape[1] % weight.input_multiple:
            reason = f"{view.shape[1]} inputs are no multiple of {weight.input_multiple}, as {weight.name} needs"
            left += [LeftAlone(module, reason) for module in view.modules]
            warnings.append(f"{view.modules[0]} is left unquantized: {reason}")
            continue
        group = _group_name(view, group_of)
        quantized.append(QuantizedWeight(view, weight, decision.input, group, decision.rule))
    return quantized, left, warnings


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


def _decide_kv(
    recipe: Recipe, model: nn.Module, views: Sequence[WeightView]
) -> tuple[QuantizedCache | None, list[str]]:
    """The cache's formats by the last rule that gives them, and warnings.

    Raises UserError where ranges would have to be calibrated in modules that no quantizer can look into.
    """
    deciding = [rule for rule in recipe.rules if rule.k is not None and rule.v is not None]
    attention = attention_modules(model)
    if not deciding or not attention:
        return None, []
    k, v = FORMATS[str(deciding[-1].k)], FORMATS[str(deciding[-1].v)]
    opaque = sorted({type(module).__name__ for module in attention.values() if not takes_registry(module)})
    cache = QuantizedCache(k, v, deciding[-1].mla, _attention_names(attention, views))
    if opaque and cache.needs_data:
        what = f"{', '.join(opaque)} computes attention by itself, so keys and values cannot be calibrated"
        raise UserError(Problem(what, "use --kv_cache_qformat fp8_cast or none"))
    return cache, [f"previews do not round the KV cache: {name} computes attention by itself" for name in opaque]


def _attention_names(attention: Iterable[str], views: Sequence[WeightView]) -> dict[str, str]:
    """The model's names of attention modules -> the source's: the parents of one linear in both."""
    source_of = {view.owner: view.modules[0] for view in views if not view.is_stacked}
    parents = {owner.rpartition(".")[0]: module.rpartition(".")[0] for owner, module in source_of.items()}
    return {name: parents.get(name, name) for name in attention}


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
