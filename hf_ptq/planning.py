"""The steps of a run that read headers and configuration only: from a source to a plan, or to a refusal.

Every rank takes them, and after each the ranks know that all have come to the same (distributed/agreement.py). What
one rank can do for all (reading the data) rank 0 does. Nothing is remembered between calls.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_ptq.checkpoint.room import room_problems
from hf_ptq.checkpoint.shards import ShardPlan, lay_out
from hf_ptq.checkpoint.source import Source
from hf_ptq.config import RunConfig
from hf_ptq.data.datasets import choose_datasets
from hf_ptq.data.rows import CalibrationData, DatasetUse, deal, read_calibration, rows_digest, too_few_rows
from hf_ptq.distributed.agreement import (
    broadcast,
    first_decides,
    least,
    one_first,
    together,
)
from hf_ptq.distributed.launch import read_wishes
from hf_ptq.distributed.plan import Plan, decide_plan
from hf_ptq.distributed.process_group import DistributedState
from hf_ptq.errors import Problem, UserError, refuse_if_any
from hf_ptq.export.config_files import NESTED_NAME, exported_config
from hf_ptq.export.destination import CONFIG_NAME, room_for_export
from hf_ptq.export.layout import KV_ALGOS, unquantized_linears
from hf_ptq.export.layouts import LAYOUTS, Contents, Layout, refuse_inexpressible
from hf_ptq.export.layouts.fakequant import STATE_FILE, STATE_FOLDER, state_json
from hf_ptq.export.layouts.layout import WEIGHT_TENSOR, contents_of
from hf_ptq.export.planned import plan_tensors
from hf_ptq.export.share import share_out
from hf_ptq.model.build import MetaModel, build_meta_model
from hf_ptq.model.device_map import measure_rooms, spread_model
from hf_ptq.model.experts import use_our_experts
from hf_ptq.model.sharding import gather_facts
from hf_ptq.model.units import Unit, split_units
from hf_ptq.model.views import weight_views
from hf_ptq.quantization.algorithms import ALGORITHMS
from hf_ptq.quantization.assignment import Assignment, assign
from hf_ptq.quantization.coverage import beyond_text
from hf_ptq.quantization.recipe import Recipe, load_recipe
from hf_ptq.report import Report
from hf_ptq.sizes import human_bytes

OF_DEVICE_MAPS = ("device_map", "offload_folder", "fetched_bytes", "warnings")  # told where there is something to tell


@dataclass(frozen=True)
class ExportPlan:
    """Everything that the export will hold beside the weights' values."""

    layout: Layout
    contents: Contents
    shards: tuple[ShardPlan, ...]
    owners: dict[str, int]  # tensor -> the rank that writes it
    scales: frozenset[str]  # tensors that have to be finite and above zero
    files: dict[str, dict[str, Any]]  # JSON files, config.json among them

    @property
    def num_bytes(self) -> int:
        """Size of all weight files."""
        return sum(shard.num_bytes for shard in self.shards)


# --- step 4 --------------------------------------------------------------------------------------


def plan_model(
    config: RunConfig, source: Source, state: DistributedState, report: Report
) -> tuple[MetaModel, tuple[Unit, ...], Plan]:
    """The model on meta, its units, and how it will be laid over the ranks."""

    def build() -> tuple[MetaModel, tuple[Unit, ...]]:
        meta = build_meta_model(source, config.attn_implementation, config.trust_remote_code)
        return meta, split_units(meta.model, meta.placements)

    in_order = one_first if config.trust_remote_code else together  # the code is copied into a cache of the node
    meta, units = in_order(state, "build the model", build)
    facts = gather_facts(meta, units, state)
    facts = replace(facts, free_bytes=least(state, facts.free_bytes))
    wishes = read_wishes(config, state.launch)
    asked = config.device_map_options()
    if state.world_size == 1 and not wishes.use_fsdp2 and (asked or not facts.fits_whole):
        rooms = measure_rooms(config, state.device)
        spread = spread_model(
            meta.model, rooms, sequential=config.use_seq_device_map, asked=asked, folder=config.offload_folder
        )
        facts = replace(facts, spread=spread)

    def decide() -> Plan:
        plan = decide_plan(facts, wishes)
        if plan.ep_degree > 1 and config.experts_implementation is not None:
            what = f"--experts_implementation {config.experts_implementation} is for runs that are not expert-parallel"
            raise UserError(Problem(what, "leave it out"))
        return plan

    plan = together(state, "decide the plan", decide)
    for reason in (*wishes.notes, *plan.reasons):
        report.say(f"plan {plan.kind}: {reason}")
    if state.world_size > 1:
        own = "what it loads, calibrates, quantizes and verifies, and its memory, are its own, not the sum"
        report.say(f"rank 0 of {state.world_size} speaks: {own}")
    for warning in plan.warnings:
        report.warn(warning)
    told = {item.name: getattr(plan, item.name) for item in fields(plan)}
    report.record("plan", {name: value for name, value in told.items() if value or name not in OF_DEVICE_MAPS})
    carried = [name for unit in units if unit.is_carried for name in unit.tensors]
    if carried:
        report.warn(
            f"{len(carried)} tensors that the model never builds are carried over as they are: {_some(carried)}"
        )
    use_our_experts(meta.model, config.experts_implementation or "grouped_mm")
    return meta, units, plan


# --- step 5 --------------------------------------------------------------------------------------


def read_recipe(config: RunConfig) -> Recipe:
    """The recipe that the options ask for, with the KV cache's."""
    return load_recipe(config.recipe or config.qformat).with_kv(config.kv_cache_qformat)


def plan_export(
    config: RunConfig,
    recipe: Recipe,
    source: Source,
    meta: MetaModel,
    units: tuple[Unit, ...],
    plan: Plan,
    report: Report,
) -> tuple[Assignment, ExportPlan]:
    """What is quantized with what, and every file of the export to the byte; refused if it does not fit."""
    if plan.world_size > 1 and not ALGORITHMS[recipe.algorithm.method].plan_safe:
        what = f"the algorithm {recipe.algorithm.method!r} has not been built for several ranks"
        raise UserError(Problem(what, "run one process, or use a recipe with the algorithm 'max'"))
    views = weight_views(meta.placements, source.tensors, meta.stacking, meta.fused)
    assignment = assign(recipe, meta.model, views, dict(meta.model.all_tied_weights_keys))
    if assignment.needs_data and config.calib_sizes:  # the data may have fewer still, which is seen when it is read
        refuse_if_any(too_few_rows(sum(config.calib_sizes), plan.world_size))
    layout = LAYOUTS[config.export_fmt]
    contents = contents_of(assignment, unquantized_linears(source, meta.model, meta.placements, assignment))
    refuse_inexpressible(layout, contents)
    planned = plan_tensors(units, source, assignment, layout)
    owners = share_out([*planned.weights, *planned.state], planned.module_of, assignment, plan)
    shards = (
        *lay_out(planned.weights, config.max_shard_bytes, owners),
        *lay_out(planned.state, config.max_shard_bytes, owners, STATE_FOLDER),
    )
    files = _json_files(layout, contents, source)
    export = ExportPlan(layout, contents, shards, owners, frozenset(planned.scales), files)
    told = (*assignment.warnings, *_idle_algorithm(recipe, assignment), *beyond_text(meta.model, assignment))
    for warning in (*told, *layout.warnings(contents)):
        report.warn(warning)
    _describe(recipe, assignment, report)
    _tell_names(assignment, layout, report)
    report.record(
        "bytes",
        {
            "source_bytes": source.total_bytes,
            "export_bytes": export.num_bytes,
            "effective_bits": round(_effective_bits(source, assignment), 3),
        },
    )
    refuse_if_any(room_problems([*source.needs(), room_for_export(config.export_path, export.num_bytes)]))
    return assignment, export


def _idle_algorithm(recipe: Recipe, assignment: Assignment) -> list[str]:
    """A word on an algorithm that the recipe asks for and that changes no weight."""
    spec, formats = recipe.algorithm, {q.weight for q in assignment.quantized}
    if not all(ALGORITHMS[spec.method].passes_over(spec, number_format) for number_format in formats):
        return []
    names = ", ".join(sorted(number_format.name for number_format in formats))
    return [f"the algorithm {spec.method} as set has no range to choose for weights in {names}: they are as by max"]


def _json_files(layout: Layout, contents: Contents, source: Source) -> dict[str, dict[str, Any]]:
    """Every JSON file of the export but the index and the report."""
    block, nested = layout.describe(contents)
    files = {CONFIG_NAME: exported_config(source.config, block)}
    if nested is not None:
        files[NESTED_NAME] = nested
    if layout.keeps_ranges:
        files[f"{STATE_FOLDER}/{STATE_FILE}"] = state_json(contents)
    return files


def _describe(recipe: Recipe, assignment: Assignment, report: Report) -> None:
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
            "algo": KV_ALGOS.get((cache.k.name, cache.v.name), cache.k.name),
            "keys": cache.k.name,
            "values": cache.v.name,
            "rule": cache.rule,
            "layers": len(cache.layers),
            "latent attention is calibrated on": cache.mla,
        },
    )


def _tell_names(assignment: Assignment, layout: Layout, report: Report) -> None:
    """Where the export's names are not the source's: each kind of exception, with how many tensors it is about."""
    views = [q.view for q in assignment.quantized]
    taken_apart = {name for view in views if view.sources and view.is_apart for name in view.sources}
    own = {
        local
        for q in assignment.quantized
        for local in layout.stored(q.scheme).layout(q.view.shape, torch.bfloat16)
        if local.startswith(WEIGHT_TENSOR) and not local.startswith(f"{WEIGHT_TENSOR}_scale")
    } - {WEIGHT_TENSOR}
    told = []
    if taken_apart:
        told.append(f"{len(taken_apart)} tensors of all experts of a layer are written expert by expert")
    if own:
        told.append(f"{len(views)} weights have the names of the layout {layout.name}: {', '.join(sorted(own))}")
    for line in told:
        report.say(f"names: {line}")
    report.record("names", told)


def _effective_bits(source: Source, assignment: Assignment) -> float:
    """Stored bits per weight of the source, scales of blocks included."""
    quantized = sum(q.view.num_elements * q.weight.bits for q in assignment.quantized)
    entries = [e for name, e in source.tensors.items() if name not in assignment.by_tensor]
    elements = sum(q.view.num_elements for q in assignment.quantized) + sum(_numel(e.shape) for e in entries)
    return (quantized + sum(8 * e.num_bytes for e in entries)) / max(1, elements)


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def end_dry_run(config: RunConfig, assignment: Assignment, export: ExportPlan, report: Report) -> Report:
    """What a run would do, beyond what was said on the way."""
    names, _ = choose_datasets(config.model, config.datasets, config.calib_sizes)
    data = f"calibration data: {', '.join(names)}" if assignment.needs_data else "no calibration data"
    cache = assignment.kv
    report.say(
        f"KV cache: {f'keys {cache.k.name}, values {cache.v.name} (by {cache.rule})' if cache else 'as it is'}; {data}"
    )
    report.say(f"{config.export_path}: {human_bytes(export.num_bytes)} of weights in {len(export.shards)} files")
    report.say("dry run: no weight was downloaded or loaded, and nothing was exported")
    return report


# --- the data --------------------------------------------------------------------------------------


def read_data(
    config: RunConfig,
    state: DistributedState,
    source: Source,
    meta: MetaModel,
    assignment: Assignment,
    report: Report,
) -> tuple[CalibrationData | None, PreTrainedTokenizerBase | None]:
    """This rank's calibration rows (None where the recipe needs none), and the tokenizer if the source has one.

    Rank 0 reads and packs; the others get the ids, and make sure that they have the same.
    """
    in_order = one_first if config.trust_remote_code else together
    tokenizer = in_order(state, "load the tokenizer", lambda: _tokenizer(config, source, report))
    if not assignment.needs_data:
        report.say("the recipe needs no calibration data: no data is read and no forward is run for it")
        report.record("data", "not needed")
        return None, tokenizer
    read: list[CalibrationData] = []

    def read_all() -> dict[str, Any]:
        names, sizes = choose_datasets(config.model, config.datasets, config.calib_sizes)
        vocabulary = meta.model.config.get_text_config().vocab_size
        data = read_calibration(names, sizes, config.calib_seq, tokenizer, report, vocab_size=vocabulary)
        _refuse_long_rows(data, meta)
        deal(data.rows, state.rank, state.world_size)
        read.append(data)
        uses, lengths = [asdict(use) for use in data.uses], [len(row) for row in data.rows]
        return {"uses": uses, "lengths": lengths, "sha256": data.sha256}

    with report.stage("data"):
        told = first_decides(state, "read the data", read_all, is_long=True)
        ids = broadcast(state, torch.cat(read[0].rows) if read else torch.empty(0, dtype=torch.int64))
        rows = ids.split(told["lengths"])

        def take() -> CalibrationData:
            assert rows_digest(rows) == told["sha256"], "the rows of this rank are not those that rank 0 read"
            uses = tuple(DatasetUse(**use) for use in told["uses"])
            return CalibrationData(tuple(deal(rows, state.rank, state.world_size)), uses, told["sha256"])

        data = together(state, "take the data", take)
    report.record("data", (read[0] if read else data).as_dict())
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


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" ... ({len(names)})" if len(names) > 3 else "")
