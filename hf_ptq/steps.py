"""The steps of a run that are not work on units: each is one call of `run.py`.

They decide, describe and record; the work itself is in the packages. Nothing here is remembered between calls.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_ptq import preview
from hf_ptq.checkpoint.shards import INDEX_NAME, ShardPlan, index_json, lay_out
from hf_ptq.checkpoint.slices import SourceReader
from hf_ptq.checkpoint.source import Source, open_source
from hf_ptq.checkpoint.writer import ShardWriter
from hf_ptq.config import RunConfig
from hf_ptq.data.datasets import choose_datasets
from hf_ptq.data.rows import CalibrationData, read_calibration
from hf_ptq.distributed.plan import Facts, decide_plan, free_bytes
from hf_ptq.distributed.process_group import DistributedState
from hf_ptq.driver import Job
from hf_ptq.errors import Problem, RunError, UserError, refuse_if_any
from hf_ptq.export.config_files import NESTED_NAME, LayerAlgo, exported_config, quantization_config, write_json
from hf_ptq.export.destination import CONFIG_NAME, Destination, check_export_path, check_room
from hf_ptq.export.layout import kv_algo, layer_algos, unquantized_linears
from hf_ptq.export.samples import by_kind, decibels, read_samples, worst_of
from hf_ptq.export.servers import EXPERT, exclude_entries, exclusion_problems, support_warnings
from hf_ptq.export.sidecars import copy_sidecars
from hf_ptq.export.tensors import WeightError, plan_tensors, write_input_scales, write_kv_scales
from hf_ptq.export.verify import Expectation, verify_export
from hf_ptq.memory import MemoryMonitor
from hf_ptq.model.build import MetaModel, build_meta_model
from hf_ptq.model.experts import use_our_experts
from hf_ptq.model.units import Unit, split_units
from hf_ptq.model.views import weight_views
from hf_ptq.preview import Preview
from hf_ptq.quantization.apply import quantizing
from hf_ptq.quantization.assignment import Assignment, assign
from hf_ptq.quantization.quantizer import Quantizer
from hf_ptq.quantization.recipe import Recipe, load_recipe
from hf_ptq.report import REPORT_FILE, Report

SCALES = frozenset({"weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale"})
LOST_DB = 10.0  # NVFP4 has about 20, FP8 31; below this a server computes with noise
PREVIEW_TOKENS = 64
DEMO_PREVIEW_TOKENS = 32


@dataclass(frozen=True)
class ExportPlan:
    """Everything that the export will hold beside the weights' values."""

    shards: tuple[ShardPlan, ...]
    algos: dict[str, LayerAlgo]  # source module -> algo
    unquantized: tuple[str, ...]  # source modules that servers build as linears
    flat: dict  # quantization_config of config.json
    nested: dict  # hf_quant_config.json

    @property
    def num_bytes(self) -> int:
        """Size of all weight files."""
        return sum(shard.num_bytes for shard in self.shards)


@dataclass(frozen=True)
class Written:
    """What was noted down while the export was written."""

    errors: list[WeightError]
    checksums: dict[str, int]
    sidecars: list[Path]


@contextmanager
def watched(state: DistributedState, report: Report) -> Iterator[None]:
    """Memory of the host, and of the GPU in use, is sampled inside the block."""
    is_gpu = state.device.type == "cuda"
    uuids = {str(state.device): str(torch.cuda.get_device_properties(state.device).uuid)} if is_gpu else {}
    with MemoryMonitor(uuids, _pinned_bytes) as monitor:
        monitor.set_baseline()
        report.attach_monitor(monitor)
        yield


def _pinned_bytes() -> int:
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def resolve(config: RunConfig, report: Report) -> Source:
    """Step 3: the source with its headers; the export path is held against it."""
    source = open_source(config.model, config.revision, config.trust_remote_code, report)
    refuse_if_any(check_export_path(config.export_path, source.directory, config.overwrite))
    report.record(
        "source",
        {
            "origin": source.origin,
            "directory": source.directory,
            "commit": source.commit,
            "tensors": len(source.tensors),
            "bytes": source.total_bytes,
        },
    )
    return source


def plan_model(
    config: RunConfig, source: Source, state: DistributedState, report: Report
) -> tuple[MetaModel, tuple[Unit, ...]]:
    """Step 4: the model on meta, its units, and where it goes."""
    meta = build_meta_model(source, config.attn_implementation, config.trust_remote_code)
    units = split_units(meta.model, meta.placements)
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in meta.model.state_dict().items()}
    unit_bytes = [
        sum(sizes[p] for p in {meta.placements[name].parameter for name in unit.tensors} if p in sizes)
        for unit in units
    ]
    tied = set(meta.model.all_tied_weights_keys)
    total = sum(size for name, size in sizes.items() if name not in tied)
    plan = decide_plan(Facts(total, max(unit_bytes), str(state.device), free_bytes(state.device)))
    for reason in plan.reasons:
        report.say(f"plan {plan.kind}: {reason}")
    report.record("plan", plan)
    carried = [name for unit in units if unit.is_carried for name in unit.tensors]
    if carried:
        report.warn(
            f"{len(carried)} tensors that the model never builds are carried over as they are: {_some(carried)}"
        )
    use_our_experts(meta.model, config.experts_implementation)
    return meta, units


def plan_export(
    config: RunConfig, source: Source, meta: MetaModel, units: tuple[Unit, ...], report: Report
) -> tuple[Recipe, Assignment, ExportPlan]:
    """Step 5: what is quantized with what, and every file of the export to the byte; refused if it does not fit."""
    recipe = load_recipe(config.recipe or config.qformat).with_kv(config.kv_cache_qformat)
    views = weight_views(meta.placements, source.tensors, meta.stacking)
    assignment = assign(recipe, meta.model, views, dict(meta.model.all_tied_weights_keys))
    algos, kv = layer_algos(assignment), kv_algo(assignment)
    unquantized = unquantized_linears(source, meta.model, meta.placements, assignment)
    flat, nested = quantization_config(algos, exclude_entries(list(algos), unquantized), kv)
    block = nested["quantization"]
    excluded, is_mixed = block.get("exclude_modules", ()), block["quant_algo"] == "MIXED_PRECISION"
    problems = exclusion_problems(algos, unquantized, excluded, is_mixed)
    if problems:
        cure = "change the recipe so that what servers fuse, and the experts of a layer, are quantized together"
        raise UserError(*(Problem(problem, cure) for problem in problems[:10]))
    shards = lay_out(plan_tensors(units, source, assignment), config.max_shard_bytes)
    export = ExportPlan(shards, algos, tuple(unquantized), flat, nested)
    expert_algos = {algo.algo for module, algo in algos.items() if EXPERT.fullmatch(module)}
    narrowed = support_warnings({algo.algo for algo in algos.values()}, expert_algos)
    for warning in (*assignment.warnings, *narrowed):
        report.warn(warning)
    _describe(recipe, assignment, kv, report)
    report.record(
        "bytes",
        {
            "source_bytes": source.total_bytes,
            "export_bytes": export.num_bytes,
            "effective_bits": round(_effective_bits(source, assignment), 3),
        },
    )
    refuse_if_any(check_room(config.export_path, export.num_bytes))
    return recipe, assignment, export


def _describe(recipe: Recipe, assignment: Assignment, kv: str | None, report: Report) -> None:
    """Which rule gave which formats to which kind of module, and what was left alone for which reason."""
    rows: dict[tuple[str, str, str, str], int] = {}
    for q in assignment.quantized:
        key = (q.view.leaf, q.weight.name, q.input.name if q.input else "-", q.rule)
        rows[key] = rows.get(key, 0) + len(q.view.modules)
    for left in assignment.left_alone:
        key = (left.module.rpartition(".")[2], "-", "-", left.reason)
        rows[key] = rows.get(key, 0) + 1
    columns = ["module", "weight", "input", "rule or reason", "count"]
    table = [dict(zip(columns, (*key, count), strict=True)) for key, count in rows.items()]
    report.table(f"recipe {recipe.name}", columns, [[str(cell) for cell in row.values()] for row in table])
    report.record("quantized", table)
    cache = assignment.kv
    report.record(
        "kv_cache",
        None
        if cache is None
        else {
            "algo": kv,
            "keys": cache.k.name,
            "values": cache.v.name,
            "layers": len(cache.layers),
            "latent attention is calibrated on": cache.mla,
        },
    )


def _effective_bits(source: Source, assignment: Assignment) -> float:
    """Stored bits per weight of the source, scales of blocks included."""
    quantized = sum(q.view.num_elements * q.weight.bits for q in assignment.quantized)
    modules = assignment.by_module
    entries = [e for name, e in source.tensors.items() if name.removesuffix(".weight") not in modules]
    elements = sum(q.view.num_elements for q in assignment.quantized) + sum(_numel(e.shape) for e in entries)
    return (quantized + sum(8 * e.num_bytes for e in entries)) / max(1, elements)


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def end_dry_run(config: RunConfig, assignment: Assignment, export: ExportPlan, report: Report) -> Report:
    """What a run would do, beyond what was said on the way."""
    names, _ = choose_datasets(config.model, config.datasets, config.calib_sizes)
    data = f"calibration data: {', '.join(names)}" if assignment.needs_data else "no calibration data"
    cache = assignment.kv
    report.say(f"KV cache: {f'keys {cache.k.name}, values {cache.v.name}' if cache else 'as it is'}; {data}")
    report.say(f"{config.export_path}: {export.num_bytes / 1e9:.3f} GB of weights in {len(export.shards)} files")
    report.say("dry run: nothing was loaded or written")
    return report


def read_data(
    config: RunConfig, source: Source, meta: MetaModel, assignment: Assignment, report: Report
) -> tuple[CalibrationData | None, PreTrainedTokenizerBase | None]:
    """The calibration rows (None where the recipe needs none), and the tokenizer if the source has one."""
    tokenizer = _tokenizer(config, source, report)
    if not assignment.needs_data:
        report.say("the recipe needs no calibration data: no data is read and no forward is run for it")
        report.record("data", "not needed")
        return None, tokenizer
    names, sizes = choose_datasets(config.model, config.datasets, config.calib_sizes)
    vocabulary = meta.model.config.get_text_config().vocab_size
    with report.stage("data"):
        data = read_calibration(names, sizes, config.calib_seq, tokenizer, report, vocab_size=vocabulary)
    _refuse_long_rows(data, meta)
    report.record("data", data.as_dict())
    return data, tokenizer


def _refuse_long_rows(data: CalibrationData, meta: MetaModel) -> None:
    """Learned positions end; on a GPU an index beyond them ends the process."""
    longest = max(len(row) for row in data.rows)
    decoder = meta.model.get_decoder() or meta.model  # towers for images have positions of their own
    embeddings = {name: m for name, m in decoder.named_modules() if isinstance(m, nn.Embedding)}
    for name, module in embeddings.items():
        if re.search(r"position|wpe$", name) and module.num_embeddings < longest:
            what = f"rows of {longest} tokens are longer than the {module.num_embeddings} positions of {name}"
            raise UserError(Problem(what, f"--calib_seq {module.num_embeddings - 2}"))


def _tokenizer(config: RunConfig, source: Source, report: Report) -> PreTrainedTokenizerBase | None:
    try:
        return AutoTokenizer.from_pretrained(source.directory, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        report.warn(f"{source.origin} has no tokenizer that transformers can load ({str(error).splitlines()[0]})")
        return None


def preview_before(config: RunConfig, job: Job, data: CalibrationData | None, report: Report) -> Preview | None:
    """Step 7: what the model says unquantized."""
    if config.skip_generate:
        return None
    with report.stage("preview before"):
        return preview.preview(job.model, job.tokenizer, _first_row(data), _preview_tokens(config), report)


def preview_after(
    config: RunConfig,
    job: Job,
    quantizers: dict[str, Quantizer],
    data: CalibrationData | None,
    before: Preview | None,
    report: Report,
) -> None:
    """The same with rounded weights and activations; both go into the report side by side."""
    if config.skip_generate:
        return
    with report.stage("preview after"), quantizing(quantizers.values()):
        after = preview.preview(job.model, job.tokenizer, _first_row(data), _preview_tokens(config), report)
    report.record(
        "previews",
        {
            "prompt": before.prompt if before else None,
            "before": before.continuation if before else None,
            "after": after.continuation if after else None,
        },
    )


def _first_row(data: CalibrationData | None) -> torch.Tensor | None:
    return data.rows[0] if data else None


def _preview_tokens(config: RunConfig) -> int:
    return DEMO_PREVIEW_TOKENS if config.model == "demo" else PREVIEW_TOKENS


def writing(source: Source) -> tuple[int, int]:
    """Threads of the writer (their time goes into checksums) and the bytes that may wait in its queue."""
    threads = max(2, min(12, (os.cpu_count() or 4) - 2))
    return threads, max(16 << 20, min(256 << 20, source.total_bytes // 16))


def write_scales(assignment: Assignment, quantizers: dict[str, Quantizer], writer: ShardWriter, report: Report) -> None:
    """The calibrated scales: of activations, and of keys and values."""
    write_input_scales(assignment, quantizers, writer)
    for warning in write_kv_scales(assignment, quantizers, writer):
        report.warn(warning)


def write_files(source: Source, export: ExportPlan, destination: Destination, report: Report) -> list[Path]:
    """Index, both configuration files, and the source's side files byte for byte; returns the latter's paths."""
    directory = destination.directory
    if len(export.shards) > 1:
        write_json(directory / INDEX_NAME, index_json(export.shards))
    write_json(directory / CONFIG_NAME, exported_config(source.config, export.flat))
    write_json(directory / NESTED_NAME, export.nested)
    return copy_sidecars(source, directory, report)


def verify(
    job: Job, export: ExportPlan, written: Written, destination: Destination, reader: SourceReader, report: Report
) -> None:
    """Step 11: what lies in the files is what was meant. Raises RunError with everything that is not."""
    directory = destination.directory
    reader.refuse_changed()
    names = [tensor.name for shard in export.shards for tensor in shard.tensors]
    expectation = Expectation(
        config=exported_config(job.source.config, export.flat),
        nested=export.nested,
        quantized=export.algos,
        unquantized_linears=export.unquantized,
        scales=[n for n in names if n.rpartition(".")[2] in SCALES],
        sidecars=written.sidecars,
    )
    verify_export(directory, export.shards, written.checksums, expectation, report)
    samples, problems = read_samples(directory, export.shards, written.errors, reader, job.meta.dtype)
    if problems:
        raise RunError(*problems)
    report.record("samples", samples)


def record_results(errors: list[WeightError], config: RunConfig, directory: Path, report: Report) -> None:
    """Signal-to-noise by kind of layer, what lies in the export, and where it will be."""
    rows = {}
    for kind, members in by_kind(errors).items():
        worst = worst_of(members)
        rows[kind] = {
            "modules": len(members),
            "dB": round(decibels(sum(e.signal for e in members), sum(e.noise for e in members)), 2),
            "worst dB": round(decibels(worst.signal, worst.noise), 2),
            "worst module": worst.module,
        }
    report.record("signal_to_noise", rows)
    lost = [e for e in errors if decibels(e.signal, e.noise) < LOST_DB]
    if lost:
        names = ", ".join(f"{e.module} ({decibels(e.signal, e.noise):.1f} dB)" for e in lost[:5])
        report.warn(
            f"{len(lost)} weights are mostly noise after quantization, as when another member of their fused group is "
            f"far larger: {names}{' ...' if len(lost) > 5 else ''}; leave them out by a rule"
        )
    files = (str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    report.record("files", sorted([*files, REPORT_FILE]))
    report.record("exported", config.export_path)


def write_report(destination: Destination, report: Report) -> None:
    """The report, as the last file of the export."""
    write_json(destination.directory / REPORT_FILE, report.as_dict())


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" ... ({len(names)})" if len(names) > 3 else "")
