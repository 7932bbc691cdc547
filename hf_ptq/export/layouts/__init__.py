"""Output layouts by name (`--export_fmt`), and what each can express."""

from __future__ import annotations

from collections.abc import Iterator

from hf_ptq.errors import Problem, refuse_if_any
from hf_ptq.export.layouts import compressed_tensors, fakequant, fp8_blocks, modelopt
from hf_ptq.export.layouts.layout import Contents, Layout, Scheme
from hf_ptq.quantization.formats.description import FORMATS

LAYOUTS: dict[str, Layout] = {
    layout.name: layout for layout in (modelopt.LAYOUT, compressed_tensors.LAYOUT, fp8_blocks.LAYOUT, fakequant.LAYOUT)
}
MAX_PROBLEMS = 10


def refuse_inexpressible(layout: Layout, contents: Contents) -> None:
    """Raise UserError where the layout has no words for a format, or no server could read the result."""
    refuse_if_any(_inexpressible(layout, contents))
    refuse_if_any([*layout.problems(contents)][:MAX_PROBLEMS])


def _inexpressible(layout: Layout, contents: Contents) -> Iterator[Problem]:
    """Formats of weights and of the cache, each with the layouts that can hold it."""
    for scheme in sorted({*contents.schemes.values()}, key=str):
        if layout.storage(scheme) is None:
            able = ", ".join(other.name for other in LAYOUTS.values() if other.storage(scheme) is not None)
            module = next(name for name, found in contents.schemes.items() if found == scheme)
            what = f"the layout {layout.name} has no name for weights in {scheme[0]} with inputs {_inputs(scheme[1])}"
            others = [inputs for inputs in (None, *FORMATS) if layout.storage((scheme[0], inputs)) is not None]
            known = f", or give inputs {' or '.join(map(_inputs, others))}" if others else ""
            yield Problem(f"{what} ({module} ...)", f"--export_fmt can be {able}{known}")
    if contents.joined and not layout.joins_experts:
        able = ", ".join(other.name for other in LAYOUTS.values() if other.joins_experts)
        what = f"the layout {layout.name} has no names for experts in one tensor ({contents.joined[0]})"
        yield Problem(what, f"--export_fmt can be {able}, or leave the experts out by a rule")
    reason = layout.kv_problem(contents.kv) if contents.kv else None
    if contents.kv and reason:
        able = ", ".join(other.name for other in LAYOUTS.values() if other.kv_problem(contents.kv) is None)
        yield Problem(
            f"the layout {layout.name} cannot hold {reason}", f"--kv_cache_qformat none, or --export_fmt {able}"
        )


def _inputs(inputs: str | None) -> str:
    return f"in {inputs}" if inputs else "as they are"


__all__ = ["LAYOUTS", "Contents", "Layout", "Scheme", "refuse_inexpressible"]
