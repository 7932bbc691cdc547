"""The modules of a model as rules see them: under which names, with which classes.

A linear, or an attention module, is known by the source's name and by the model's own. Layers can be counted from the
end: where a source has `model.layers.0` to `model.layers.3`, the last is also called `model.layers.-1`. Stacked experts
are known one by one under the source's names, as one projection under the model's, and ModelOpt knows their quantizers
by the stacked parameter. This file knows names; what the rules say to them is in rules.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from hf_ptq.model.views import WeightView
from hf_ptq.quantization.modules import class_names
from hf_ptq.quantization.rules import Place

LAYER = re.compile(r"(?P<stack>[^0-9]*?)(?<![^.])(?P<number>\d+)(?=\.|$)")  # the first part that is a number


def places_of(views: Sequence[WeightView], modules: Mapping[str, nn.Module]) -> dict[WeightView, tuple[Place, ...]]:
    """The places of each view: one, or one an expert. `modules`: the model's, by name."""
    counts = _layer_counts([*modules, *(name for view in views for name in view.modules)])
    return {
        view: tuple(
            _place(view, expert, class_names(modules[view.owner]), counts) for expert in range(len(view.modules))
        )
        for view in views
    }


def attention_places(layers: Mapping[str, str], modules: Mapping[str, nn.Module]) -> tuple[Place, ...]:
    """The places of attention modules. `layers`: the model's name of each -> the source's; `modules`: all, by name."""
    counts = _layer_counts([*modules, *layers.values()])
    names = {own: tuple(dict.fromkeys((source, own))) for own, source in layers.items()}
    return tuple(
        Place((*known, *_from_the_end(known, counts)), class_names(modules[own])) for own, known in names.items()
    )


def stacked_place(
    names: tuple[str, ...], parameter: str, expert: int, classes: tuple[str, ...], stack: str | None = None
) -> Place:
    """One expert of a stacked parameter. `stack`: the source's name of all experts of the layer.

    ModelOpt has one quantizer for the input of all experts of a layer and a list of those of their weights; a pattern
    may leave out the number in that list.
    """
    owner, _, leaf = parameter.rpartition(".")
    stacks = dict.fromkeys((owner, owner if stack is None else stack))
    weights = tuple(f"{s}.{leaf}_weight_quantizer{end}" for s in stacks for end in (f"s.{expert}", ""))
    inputs = tuple(f"{s}.{leaf}_input_quantizer" for s in stacks)
    return Place(names, classes, {"weight": weights, "input": inputs, "output": ()}, in_a_list=("weight",))


def _place(view: WeightView, expert: int, classes: tuple[str, ...], counts: Mapping[str, int]) -> Place:
    own = view.parameter.removesuffix(".weight")
    names = (view.modules[expert], own, *((f"{view.owner}.{view.leaf}",) if view.is_stacked else ()))
    names = tuple(dict.fromkeys((*names, *_from_the_end(names, counts))))
    if not view.is_stacked:
        return Place(names, classes)
    return stacked_place(names, view.parameter, expert, classes, view.stack)


def _layer_counts(names: Iterable[str]) -> dict[str, int]:
    """What stands before a layer's number -> the number of layers."""
    counts: dict[str, int] = {}
    for name in names:
        if found := LAYER.match(name):
            counts[found["stack"]] = max(counts.get(found["stack"], 0), int(found["number"]) + 1)
    return counts


def _from_the_end(names: Iterable[str], counts: Mapping[str, int]) -> list[str]:
    """The names with their layers counted from the end."""
    found = [(name, match) for name in names if (match := LAYER.match(name))]
    return [
        f"{m['stack']}{int(m['number']) - counts[m['stack']]}{name[m.end() :]}"
        for name, m in found
        if m["stack"] in counts
    ]
