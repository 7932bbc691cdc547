"""The resident driver: all units through one step, then through the next.

Load, quantize and export are functions of one unit; a driver is only the order of the calls. (A streaming driver
will run all steps per unit.) Encoding a unit queues its tensors for writing and goes on, so that the disk works while
the next unit is encoded, and while the second preview runs. All ranks go through the same units in the same order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ptq.checkpoint.slices import SourceReader
from hf_ptq.checkpoint.source import Source
from hf_ptq.data.loop import Lockstep, choose_batch_size, run_calibration
from hf_ptq.data.rows import CalibrationData, batches
from hf_ptq.distributed.agreement import least, most, reduce_over_ranks, together
from hf_ptq.distributed.plan import Plan, free_bytes
from hf_ptq.distributed.process_group import DistributedState
from hf_ptq.errors import RunError
from hf_ptq.export.share import Share
from hf_ptq.export.tensors import Output, WeightError, copy_unit, quantize_unit, weights_of, written_modules
from hf_ptq.model.build import MetaModel, finish_loading
from hf_ptq.model.device_map import Offloaded, brought, by_place, dispatch, offload, places_to_fill, release
from hf_ptq.model.experts import no_tokens, takes_registry
from hf_ptq.model.fill import Filler
from hf_ptq.model.finite import refuse_nonfinite
from hf_ptq.model.sharding import reshard, shard_model
from hf_ptq.model.units import Unit
from hf_ptq.model.views import weight_views
from hf_ptq.quantization.algorithm import AlgorithmSpec
from hf_ptq.quantization.algorithms import ALGORITHMS
from hf_ptq.quantization.apply import attach_quantizers, not_observing
from hf_ptq.quantization.assignment import Assignment
from hf_ptq.quantization.calibration import begin, calls, end
from hf_ptq.quantization.coverage import LayerCoverage, by_layer, expert_coverage, never_called, starved_warning
from hf_ptq.quantization.quantizer import Quantizer
from hf_ptq.quantization.ranges import RangesOf
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
    algorithm: AlgorithmSpec
    state: DistributedState
    plan: Plan
    data: CalibrationData | None
    tokenizer: PreTrainedTokenizerBase | None
    offloaded: Offloaded = field(default_factory=Offloaded)  # what a device map keeps outside of the model

    @property
    def model(self) -> PreTrainedModel:
        """The model: on meta first, filled by `load`."""
        return self.meta.model

    def release(self) -> None:
        """The model has done its work: what a device map keeps outside of it is given back."""
        release(self.model, self.plan, self.offloaded)


def lay_out(job: Job, owners: Mapping[str, int]) -> Share:
    """Put the plan into the model, which is on meta; what this rank holds of it. `owners`: as `export.share` has it."""
    held = together(job.state, "lay out the model", lambda: shard_model(job.meta, job.plan, job.state))
    return Share(job.state.rank, job.plan, owners, held)


def load(job: Job, share: Share, reader: SourceReader, report: Report) -> None:
    """Fill this rank's share of the model unit by unit; raises RunError naming tensors that hold NaN or infinity."""
    views = weight_views(job.meta.placements, job.source.tensors, job.meta.stacking, job.meta.fused)
    view_of = {module: view for view in views for module in view.modules}
    built = [unit for unit in job.units if not unit.is_carried]
    places = places_to_fill(job.meta, job.plan)
    read_ahead = 0 if job.plan.offload_folder is not None else None  # one unit in memory, until it is in the folder

    def fill() -> None:
        with Filler(
            job.meta, reader, job.state.device, held=share.held, places=places, read_ahead=read_ahead
        ) as filler:
            total = filler.total_bytes(built)
            with report.progress("load", total, "bytes") as advance:
                for unit in filler.fill(built, advance):
                    for part in by_place(unit, job.meta, places):
                        refuse_nonfinite(part, job.model, job.meta.placements, view_of, share.held)
                    offload(unit, job.meta, job.plan, job.offloaded)
                finish_loading(job.meta, job.state.device, job.offloaded)
        dispatch(job.model, job.plan, job.offloaded)

    together(job.state, "load", fill)
    report.record("loaded", {"bytes": reader.bytes_read, "of bytes": job.source.total_bytes})


def attach(job: Job) -> dict[str, Quantizer]:
    """The quantizers of all activations, on the experts and modules that run here."""
    return attach_quantizers(job.model, job.assignment, lambda experts: job.plan.run_experts(experts, job.state.rank))


def calibrate(job: Job, quantizers: Mapping[str, Quantizer], batch_size: int, report: Report) -> None:
    """Run this rank's rows through the model and give every quantizer its range, over the rows of all ranks."""
    assert job.data is not None
    state = job.state
    statistics = begin(job.algorithm, quantizers, state.device)
    size, reason = _batch_size(job, batch_size)
    report.say(f"   batches of {size} rows ({reason})")
    report.record("batch_size", {"rows": size, "reason": reason})
    own = list(batches(job.data.rows, size))
    lockstep = None
    if state.world_size > 1:
        forwards = most(state, len(own)) if job.plan.shards_model else len(own)
        lockstep = Lockstep(forwards, lambda: _idle(job, quantizers))
    state.enter("calibrate")
    forward = _calibrated_forward(job, quantizers)
    look = partial(_refuse_unreached, job, quantizers, statistics)
    run_calibration(forward, own, state.device, statistics, report, lockstep, look)
    together(state, "finish calibration", lambda: None)  # a late rank is waited for here, where it can be named
    statistics.reduce(lambda flat, reduction, _group: reduce_over_ranks(state, flat, reduction))
    for warning in together(state, "take the ranges", lambda: end(job.algorithm, quantizers, statistics)):
        report.warn(warning)
    report_coverage(expert_coverage(quantizers), report)


def _refuse_unreached(job: Job, quantizers: Mapping[str, Quantizer], statistics: Statistics) -> None:
    """After the first batch: RunError on all ranks where no rank has called any module of a kind."""
    state = job.state
    together(state, "finish the first batch", lambda: None)
    own = calls(job.algorithm, quantizers, statistics)
    flat = torch.tensor(list(own.values()), dtype=torch.float64)
    reduce_over_ranks(state, flat, "sum")

    def look() -> None:
        problems = never_called(dict(zip(own, flat.tolist(), strict=True)), quantizers, whole_kinds=True)
        if problems:
            raise RunError(*problems)

    together(state, "look at the first batch", look)
    state.enter("calibrate")  # again


def _batch_size(job: Job, asked: int) -> tuple[int, str]:
    """Rows in a batch, the same on all ranks, and why."""
    assert job.data is not None
    if asked:
        return asked, "--batch_size"
    row_tokens = max(len(row) for row in job.data.rows)
    tokens = _token_bytes(job.model, row_tokens, job.plan)
    size, reason = choose_batch_size(len(job.data.rows), row_tokens, tokens, _allowed_bytes(job))
    poorest = least(job.state, size)
    return poorest, reason if poorest == size else f"{reason}; the poorest rank takes {poorest}"


@contextmanager
def _idle(job: Job, quantizers: Mapping[str, Quantizer]) -> Iterator[None]:
    """A forward that is made to keep in step: nothing of this rank's rows is recorded, here or by others.

    Under expert parallelism this rank's experts go on recording, since the others' rows come to them.
    """
    runs_for_others = job.plan.ep_degree > 1
    own = [q for q in quantizers.values() if q.num_experts is None or not runs_for_others]
    with not_observing(own), no_tokens(job.model) if runs_for_others else nullcontext():
        yield


@dataclass(frozen=True)
class FromMemory:
    """Where a model in memory decides what is written: `ranges_of` its weights, and `write_unit`: all that is not
    quantized in a unit."""

    ranges_of: RangesOf
    write_unit: Callable[[Unit], None]


def quantize(
    job: Job,
    output: Output,
    reader: SourceReader,
    keep_rounded: bool,
    report: Report,
    from_memory: FromMemory | None = None,
) -> list[WeightError]:
    """Encode every unit and queue this rank's share of it for writing; see `export.tensors.quantize_unit`.

    What is not quantized are the source's bytes, and ranges those that the algorithm takes from the weights, unless it
    is `from_memory`.
    """
    reshard(job.model)
    of_weights = partial(ALGORITHMS[job.algorithm.method].weight_ranges, job.algorithm)
    ranges_of = of_weights if from_memory is None else from_memory.ranges_of
    errors: list[WeightError] = []
    sizes = {q: q.view.shape[0] * q.view.shape[1] for q in job.assignment.quantized}
    elements = {module: size for q, size in sizes.items() for module in written_modules(q, output)}
    with report.progress("quantize", sum(elements.values()), "weights") as advance:
        for unit in job.units:
            names = [q.view.parameter for q in weights_of(unit, job.assignment)]
            if from_memory is None:
                copy_unit(unit, job.assignment, output, reader)
            else:
                from_memory.write_unit(unit)
            with brought(job.model, names, job.offloaded, job.state.device, keep_rounded):
                done = quantize_unit(unit, job.model, job.assignment, output, keep_rounded, ranges_of)
            errors += done
            advance(sum(elements[error.module] for error in done))
    return errors


def _calibrated_forward(job: Job, quantizers: Mapping[str, Quantizer]) -> Callable[[Mapping[str, Any]], object]:
    """The model's body, without logits, unless something outside the body is calibrated.

    FSDP2 gathers what stands outside of the layers when its root is called: then it is the whole model, with the
    logits of one token.
    """
    model = job.model
    inside = {id(module) for module in model.base_model.modules()}
    needs_logits = any(id(q) not in inside for q in quantizers.values())
    if job.plan.dense != "fsdp":
        body = model if needs_logits else model.base_model
        return lambda batch: body(**batch, use_cache=False)
    shortens = not needs_logits and "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"use_cache": False} | ({"logits_to_keep": 1} if shortens else {})
    return lambda batch: model(**batch, **options)


def _token_bytes(model: PreTrainedModel, row_tokens: int, plan: Plan) -> int:
    """The largest activations that one token needs at a time, from the sizes of the model.

    Two copies of the hidden state in fp32 (norms) and the larger of: the widest projection three times (gate, up,
    product); a row of attention scores per head, where the attention materialises them; the rows of the experts that
    a token is routed to (input, both products, output before and after its weight and its way back). Where ranks
    exchange tokens, the outputs are weighed when the other rows are gone (3 rows of a choice at a time, not 5), a token
    is received once for each rank that it needs, and all that twice, since a rank may get more than its share.
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
    hidden, inner, routed = config.hidden_size, max(widths, default=0), 0
    if plan.ep_degree > 1:
        routed = 2 * (choices * (3 * hidden + 5 * inner) + min(choices, plan.ep_degree) * hidden) * size
    elif widths:
        routed = choices * (5 * hidden + 5 * inner) * size
    return hidden * 8 + max(projection, scores, routed)


def _allowed_bytes(job: Job) -> int:
    """Memory that activations may use: half of what is free, and no more than a batch gains from.

    On a GPU that is GPU_ACTIVATIONS; on a CPU a small part of the weights, so that batches stay near the caches.
    """
    device, sharers = job.state.device, job.state.launch.local_world_size
    is_gpu = device.type == "cuda"
    devices = {device, *(torch.device(name) for name in job.plan.device_map.values() if name.startswith("cuda"))}
    free = max(0, min(map(free_bytes, devices)) - job.plan.fetched_bytes)
    half = free // (2 if is_gpu else 2 * sharers)
    enough = GPU_ACTIVATIONS if is_gpu else max(1 << 26, job.source.total_bytes // 16)
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
