"""The resident driver: all units through one step, then through the next.

Load, quantize and export are functions of one unit; a driver is only the order of the calls. (A streaming driver
will run all steps per unit.) Encoding a unit queues its tensors for writing and goes on, so that the disk works while
the next unit is encoded, and while the second preview runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ptq.checkpoint.slices import SourceReader
from hf_ptq.checkpoint.source import Source
from hf_ptq.checkpoint.writer import ShardWriter
from hf_ptq.data.loop import choose_batch_size, run_calibration
from hf_ptq.data.rows import CalibrationData
from hf_ptq.distributed.plan import free_bytes
from hf_ptq.export.tensors import WeightError, quantize_unit
from hf_ptq.model.build import MetaModel, finish_loading
from hf_ptq.model.experts import takes_registry
from hf_ptq.model.fill import Filler
from hf_ptq.model.finite import refuse_nonfinite
from hf_ptq.model.units import Unit
from hf_ptq.quantization.algorithms import ALGORITHMS
from hf_ptq.quantization.assignment import Assignment
from hf_ptq.quantization.coverage import LayerCoverage, by_layer, expert_coverage, starved_warning
from hf_ptq.quantization.quantizer import Quantizer
from hf_ptq.quantization.statistics import Statistics
from hf_ptq.report import Report

GPU_ACTIVATIONS = 3 << 30  # bytes; larger batches are no faster: the GPU is full


@dataclass(frozen=True)
class Job:
    """What the steps before loading have settled."""

    source: Source
    meta: MetaModel
    units: tuple[Unit, ...]
    assignment: Assignment
    algorithm: str
    device: torch.device
    tokenizer: PreTrainedTokenizerBase | None

    @property
    def model(self) -> PreTrainedModel:
        """The model: on meta first, filled by `load`."""
        return self.meta.model


def load(job: Job, reader: SourceReader, report: Report) -> None:
    """Fill the model unit by unit; raises RunError naming tensors that hold NaN or infinity."""
    views = {module: q.view for module, q in job.assignment.by_module.items()}
    built = [unit for unit in job.units if not unit.is_carried]
    total = sum(job.source.tensors[name].num_bytes for unit in built for name in unit.tensors)
    with report.progress("load", total, "bytes") as advance, Filler(job.meta, reader, job.device) as filler:
        for unit in filler.fill(built, advance):
            refuse_nonfinite(unit, job.model, job.meta.placements, views)
        finish_loading(job.meta, job.device)


def calibrate(
    job: Job, quantizers: Mapping[str, Quantizer], data: CalibrationData, batch_size: int, report: Report
) -> None:
    """Run the rows through the model and give every quantizer its range."""
    algorithm = ALGORITHMS[job.algorithm]
    statistics = Statistics(algorithm.statistics(quantizers), job.device)
    algorithm.start(quantizers, statistics)
    body = _without_head(job, quantizers)
    row_tokens = max(len(row) for row in data.rows)
    size, reason = batch_size, "--batch_size"
    if size == 0:
        size, reason = choose_batch_size(
            len(data.rows), row_tokens, _token_bytes(job.model, row_tokens), _allowed_bytes(job)
        )
    report.say(f"   batches of {size} rows ({reason})")
    report.record("batch_size", {"rows": size, "reason": reason})
    run_calibration(lambda batch: body(**batch, use_cache=False), data.rows, size, job.device, statistics, report)
    for warning in algorithm.finish(quantizers, statistics):
        report.warn(warning)
    report_coverage(expert_coverage(quantizers), report)


def quantize(
    job: Job, writer: ShardWriter, reader: SourceReader, keep_rounded: bool, report: Report
) -> list[WeightError]:
    """Encode every unit and queue it for writing; see `export.tensors.quantize_unit`."""
    errors: list[WeightError] = []
    elements = {q.view.modules[0]: q.view.num_elements for q in job.assignment.quantized}
    with report.progress("quantize", sum(elements.values()), "weights") as advance:
        for unit in job.units:
            done = quantize_unit(unit, job.model, job.assignment, writer, reader, keep_rounded)
            errors += done
            advance(sum(elements.get(error.module, 0) for error in done))
    return errors


def _without_head(job: Job, quantizers: Mapping[str, Quantizer]) -> torch.nn.Module:
    """The model's body: no logits are computed, unless something outside the body is calibrated."""
    body = job.model.base_model
    inside = {id(module) for module in body.modules()}
    return body if all(id(q) in inside for q in quantizers.values()) else job.model


def _token_bytes(model: PreTrainedModel, row_tokens: int) -> int:
    """The largest activations that one token needs at a time, from the sizes of the model.

    Two copies of the hidden state in fp32 (norms) and the larger of: the widest projection three times (gate, up,
    product); a row of attention scores per head, where the attention materialises them; the rows of the experts that
    a token is routed to (input, both products, output before and after its weight and its way back).
    """
    config = model.config.get_text_config()
    size = model.dtype.itemsize
    linears = [m.out_features for m in model.base_model.modules() if isinstance(m, torch.nn.Linear)]
    projection = max([config.hidden_size, *linears]) * 3 * size
    heads = config.to_dict().get("num_attention_heads") or 0
    scores = heads * row_tokens * 6 if config._attn_implementation == "eager" else 0
    experts: list[Any] = [m for m in model.modules() if takes_registry(m)]
    widths = [m.down_proj.shape[-1] for m in experts]
    choices = config.to_dict().get("num_experts_per_tok") or 1
    routed = choices * (5 * config.hidden_size + 5 * max(widths)) * size if widths else 0
    return config.hidden_size * 8 + max(projection, scores, routed)


def _allowed_bytes(job: Job) -> int:
    """Memory that activations may use: half of what is free, and no more than a batch gains from.

    On a GPU that is GPU_ACTIVATIONS; on a CPU a small part of the weights, so that batches stay near the caches.
    """
    half = free_bytes(job.device) // 2
    enough = GPU_ACTIVATIONS if job.device.type == "cuda" else max(1 << 26, job.source.total_bytes // 16)
    return min(half, enough)


def report_coverage(coverage: list[LayerCoverage], report: Report) -> None:
    """How many tokens each expert saw, in the report whole, on the screen a line a layer."""
    if not coverage:
        return
    report.record("experts", {c.name: {"rows": c.rows, "amax": c.amax} for c in coverage})
    layers = by_layer(coverage)
    rows = []
    for layer, c in layers.items():
        marked = [f"{expert} (none)" for expert in c.starved] + [str(expert) for expert in c.rare]
        rows.append([layer, str(min(c.rows)), f"{sum(c.rows) / len(c.rows):.0f}", str(max(c.rows)), ", ".join(marked)])
    report.table("tokens an expert saw", ["experts of", "least", "mean", "most", "below 5 % of the mean"], rows)
    warning = starved_warning(coverage)
    if warning:
        report.warn(warning)
