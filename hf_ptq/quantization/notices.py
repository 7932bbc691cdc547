"""What a run is told about a recipe that is carried out, and that does less or more than its author may think.

Nothing is left alone in silence: modules that a format does not fit, kinds that no server reads quantized, patterns
that fit nothing, or only modules that never get a quantizer, and linears that servers build unquantized. One warning
for each kind and reason, with a module as an example and with what cures it. This file decides nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from hf_ptq.model.views import WeightView
from hf_ptq.quantization.modules import LINEAR, class_names, kind_of
from hf_ptq.quantization.places import places_of
from hf_ptq.quantization.recipe import Recipe
from hf_ptq.quantization.rules import AnyRule, Known, Place, Rule, settle

EVERY_MODULE = ("*", "*weight_quantizer")
UNREAD = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Linears that choose or weigh experts: servers build them without quantization, whatever a checkpoint holds.
BUILT_UNQUANTIZED = ("*shared_expert_gate", "*mlp.gate", "*moe.gate", "*mixer.gate", "*router", "*router.*")
UNFIT_CURE = "a last rule can give them a format without blocks, such as fp8, or turn them off (enable: false)"


def counted(names: Sequence[str]) -> str:
    """How many modules, and the first of them."""
    return f"{len(names)} modules ({names[0]} ...)" if len(names) > 1 else names[0]


def unfit_warnings(unfit: Iterable[tuple[str, str, str]], cure: str = "") -> list[str]:
    """One warning for each kind of module and reason. `unfit`: (module, its kind, the reason)."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for module, kind, reason in unfit:
        found.setdefault((kind, reason), {})[module] = None
    end = f"; {cure}" if cure else ""
    return [
        f"{counted(list(modules))} {'are' if len(modules) > 1 else 'is'} left unquantized: {reason}{end}"
        for (_, reason), modules in found.items()
    ]


def recipe_warnings(recipe: Recipe, modules: Mapping[str, nn.Module], views: Sequence[WeightView]) -> Iterator[str]:
    """What of the recipe is not carried out, or is without effect in a model. `modules`: the model's, by name."""
    places = places_of(views, modules)
    yield from recipe.notes
    yield from _unread(recipe, modules)
    yield from _unmatched(recipe, modules, places)
    yield from _without_quantizers(recipe, modules, places)


def gate_warnings(quantized: Iterable[str]) -> Iterator[str]:
    """Quantized modules that servers build as plain linears."""
    gates = [name for name in quantized if any(fnmatchcase(name, pattern) for pattern in BUILT_UNQUANTIZED)]
    if gates:
        yield (
            f"{counted(gates)} will be quantized, and servers may build such gates of experts unquantized, and then "
            "fail to load them; presets leave them out: add {import: default_disabled} as a last rule"
        )


def _unread(recipe: Recipe, modules: Mapping[str, nn.Module]) -> list[str]:
    """Embeddings and convolutions that a rule is about: no server reads them quantized, so they are left alone.

    A rule for every module says nothing of them.
    """
    asked: dict[str, list[str]] = {}
    for name, module in modules.items():
        if not isinstance(module, UNREAD):
            continue
        decision = settle(recipe.rules, "weight", Place((name,), class_names(module)))
        if decision.asks and str(decision.rule) not in EVERY_MODULE:
            asked.setdefault(type(module).__name__, []).append(name)
    return [
        f"{len(names)} {kind} modules ({names[0]}{' ...' if len(names) > 1 else ''}) are left unquantized, though the "
        "recipe asks for them: no server reads them quantized"
        for kind, names in asked.items()
    ]


def _unmatched(
    recipe: Recipe, modules: Mapping[str, nn.Module], places: Mapping[WeightView, Sequence[Place]]
) -> list[str]:
    """Patterns and classes of the recipe that fit no module that they could be about, unless their rule is optional."""
    of_views = tuple(place for of_view in places.values() for place in of_view)
    stacks = {view.owner for view in places if view.is_stacked}
    holders = {name for name, module in modules.items() if module._modules or name in stacks}
    every = (*of_views, *(Place((name,), class_names(module)) for name, module in modules.items()))
    known = Known(every, frozenset(holders.difference(name for place in of_views for name in place.names)))
    told = dict.fromkeys(what for rule in recipe.rules for what in rule.unmatched(known))
    return [f"recipe {recipe.name}: {what}" for what in told]


def _without_quantizers(
    recipe: Recipe, modules: Mapping[str, nn.Module], places: Mapping[WeightView, Sequence[Place]]
) -> Iterator[str]:
    """Patterns that give a format and fit only modules that never get a quantizer, such as norms and routers."""
    linears = [p for view, of_view in places.items() if _is_linear(view, modules) for p in of_view]
    read = {view.owner for view in places if _is_linear(view, modules)}
    others = {
        name: Place((name, *(n for v, of_view in places.items() if v.owner == name for n in of_view[0].names)), classes)
        for name, module in modules.items()
        if not module._modules and name not in read and not isinstance(module, UNREAD)
        for classes in [class_names(module)]
    } if any(_gives_weights(rule) for rule in recipe.rules) else {}  # fmt: skip
    for rule in recipe.rules:
        if rule.optional or not _gives_weights(rule):
            continue
        for part in _by_pattern(rule):
            fitting = [name for name, place in others.items() if part.says("weight", place) is not None]
            if fitting and not any(part.says("weight", place) is not None for place in linears):
                kinds = ", ".join(sorted({type(modules[name]).__name__ for name in fitting}))
                yield (
                    f"recipe {recipe.name}: pattern {part.pattern[0]!r} quantizes nothing: {counted(fitting)} of the "
                    f"class {kinds} have no quantizers in a transformers model; take the rule out"
                )


def _is_linear(view: WeightView, modules: Mapping[str, nn.Module]) -> bool:
    return view.is_stacked or kind_of(modules[view.owner]) is LINEAR


def _gives_weights(rule: AnyRule) -> bool:
    return rule.weight is not None if isinstance(rule, Rule) else rule.enable and "weight" in rule.formats


def _by_pattern(rule: AnyRule) -> list[AnyRule]:
    """The rule as several, each with one of its patterns."""
    if isinstance(rule, Rule):
        return [rule.model_copy(update={"pattern": (pattern,)}) for pattern in rule.pattern]
    return [dataclasses.replace(rule, pattern=(pattern,)) for pattern in rule.pattern]
