"""What the calibration data reached: rows per expert and layer, and modules that were never called.

Every expert's weights are quantized, reached or not; what an expert that no token reached lacks is a range for its
inputs. It takes the layer's largest, as every server does with all experts of a layer. That is no fault, but too
little data or a bad mix is worth knowing: experts without a token, or far below the mean, are named.

A module that was never called has no range at all, which is an error. They are told by kind, that is by their name with
its numbers taken out: where the first batch called no module of a kind, as in the tower for images of a model that is
calibrated on text, no later batch will. One module of many may still be called, by tokens that are yet to come.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from transformers import PreTrainedModel

from hf_ptq.errors import Problem
from hf_ptq.quantization.assignment import Assignment
from hf_ptq.quantization.quantizer import Quantizer

RARE_SHARE = 0.05  # of the layer's mean rows per expert
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a dotted name


@dataclass(frozen=True)
class LayerCoverage:
    """The input of one product of a layer's experts: rows and amax of each expert."""

    name: str
    rows: tuple[int, ...]
    amax: tuple[float, ...]

    @property
    def starved(self) -> list[int]:
        """Experts that saw no token."""
        return [expert for expert, count in enumerate(self.rows) if count == 0]

    @property
    def rare(self) -> list[int]:
        """Experts that saw some tokens, but fewer than 5 % of the mean."""
        mean = sum(self.rows) / len(self.rows)
        return [expert for expert, count in enumerate(self.rows) if 0 < count < RARE_SHARE * mean]


def expert_coverage(quantizers: Mapping[str, Quantizer]) -> list[LayerCoverage]:
    """The coverage of every calibrated experts input, in the order of the layers; one transfer from the device."""
    calibrated = {key: (q.expert_rows, q.expert_amax) for key, q in quantizers.items()}
    known = {key: (rows, amax) for key, (rows, amax) in calibrated.items() if rows is not None and amax is not None}
    if not known:
        return []
    flat = torch.cat([tensor for pair in known.values() for tensor in pair]).tolist()
    coverage, start = [], 0
    for key, (rows, _) in known.items():
        count = len(rows)
        numbers, ranges = flat[start : start + count], flat[start + count : start + 2 * count]
        coverage.append(LayerCoverage(key, tuple(int(n) for n in numbers), tuple(ranges)))
        start += 2 * count
    return coverage


def by_layer(coverage: Iterable[LayerCoverage]) -> dict[str, LayerCoverage]:
    """Experts of a layer -> the coverage of their first product; the second sees the same tokens."""
    layers: dict[str, LayerCoverage] = {}
    for product in coverage:
        layers.setdefault(product.name.rpartition(".")[0], product)
    return layers


def starved_warning(coverage: Sequence[LayerCoverage], shown: int = 4) -> str | None:
    """One sentence that names the experts without a token; None where every expert saw one."""
    starved = {layer: product.starved for layer, product in by_layer(coverage).items() if product.starved}
    if not starved:
        return None
    total = sum(len(experts) for experts in starved.values())
    named = "; ".join(f"{layer}: {', '.join(map(str, experts))}" for layer, experts in list(starved.items())[:shown])
    more = f"; and {len(starved) - shown} more layers, in the report" if len(starved) > shown else ""
    return (
        f"{total} experts of {len(starved)} layers saw no calibration token and take their layer's largest input "
        f"scale: {named}{more}"
    )


def kinds_of(modules: Iterable[str]) -> dict[str, list[str]]:
    """Kind -> its modules: names that differ in numbers alone, as `model.layers.*.mlp.up_proj`."""
    kinds: dict[str, list[str]] = {}
    for module in modules:
        kinds.setdefault(NUMBER.sub("*", module), []).append(module)
    return kinds


def never_called(
    calls: Mapping[str, float], quantizers: Mapping[str, Quantizer], whole_kinds: bool = False
) -> list[Problem]:
    """One problem that names all modules without a call by kind, none if there is none.

    `calls`: key -> how often calibration has called the quantizer. `whole_kinds`: of these, only the kinds of which no
    module was called; modules of a kind that was called in part are told one by one.
    """
    missed = [name for key, count in calls.items() if count == 0 for name in quantizers[key].names]
    called = kinds_of(name for key, count in calls.items() if count for name in quantizers[key].names)
    shown: list[str] = []
    patterns: list[str] = []
    total = 0
    for kind, members in kinds_of(missed).items():
        if kind in called and whole_kinds:
            continue
        total += len(members)
        one_by_one = kind in called or len(members) == 1
        shown += members if one_by_one else [f"{kind} ({len(members)})"]
        patterns += members if one_by_one or _fits_others(kind, members, quantizers) else [kind]
    if not total:
        return []
    lead, end = ("1 module was", "its input has") if total == 1 else (f"{total} modules were", "their inputs have")
    what = f"{lead} never called in calibration, so {end} no range: {', '.join(shown)}"
    quoted = ", ".join(f'"{pattern}"' for pattern in patterns)
    cure = f"leave them out by the recipe's last rule, {{pattern: [{quoted}], enable: false}}"
    return [Problem(what, cure + ", after an import of the preset, if it is one; or give data that reaches them")]


def _fits_others(kind: str, members: Sequence[str], quantizers: Mapping[str, Quantizer]) -> bool:
    """Whether a rule for `kind` could turn off more than its members: its stars stand for dots, too."""
    names = {name for quantizer in quantizers.values() for name in quantizer.names}
    return kind[0] == "*" or kind[-1] == "*" or any(fnmatchcase(name, kind) for name in names.difference(members))


def beyond_text(model: PreTrainedModel, assignment: Assignment) -> list[str]:
    """A word on calibrated inputs outside of the language model: in towers for images or sounds, which text passes by.

    It is no refusal: some models run such parts for text too, which only a forward shows (driver.py, first batch).
    """
    decoder = model.get_decoder()
    if decoder is None or model.config.is_encoder_decoder:
        return []
    inside = {id(module) for part in (decoder, model.get_output_embeddings()) if part for module in part.modules()}
    modules = dict(model.named_modules())
    static = [q for q in assignment.quantized if q.input is not None and q.input.needs_data]
    names = [name for q in static if id(modules[q.view.owner]) not in inside for name in q.view.modules]
    if not names:
        return []
    kinds = ", ".join(f"{kind} ({len(members)})" for kind, members in kinds_of(names).items())
    return [
        f"{len(names)} linears outside of the language model get static input ranges, and calibration is by text: if "
        f"it does not reach them the run stops at its first batch; leave them out by a rule (enable: false): {kinds}"
    ]
