"""Between a checkpoint and a model in memory: load by a plan, export what was quantized and trained.

`export` takes the way of a run from its step 5 on, with the model of the script in place of the one that the command
loads: the same assignment, made anew from the source's names, the same writing and verifying. What differs:

    ranges of weights and inputs    are those of the model's quantizers; weights are encoded as they are now
    what is not quantized           is copied from the source where the model still has the same numbers in it, and
                                    written from the model, in the source's dtype, where training has changed them

So a model that was not trained gives the bytes that the command gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from hf_ptq import driver, planning, sourcing, steps
from hf_ptq.checkpoint.dtypes import TORCH_DTYPES
from hf_ptq.checkpoint.slices import SourceReader
from hf_ptq.checkpoint.writer import ShardWriter
from hf_ptq.config import RunConfig
from hf_ptq.distributed.agreement import first_decides, together
from hf_ptq.distributed.launch import option_problems, read_launch, read_wishes
from hf_ptq.distributed.plan import Plan
from hf_ptq.distributed.process_group import DistributedState
from hf_ptq.errors import Problem, UserError, refuse_if_any
from hf_ptq.export.samples import by_kind, worst_of
from hf_ptq.export.share import Share
from hf_ptq.export.shared_destination import SharedDestination
from hf_ptq.export.tensors import Output, WeightError, unquantized_of
from hf_ptq.library import current_state, quantizers
from hf_ptq.model.build import MetaModel, build_meta_model, original_tensors
from hf_ptq.model.experts import use_our_experts
from hf_ptq.model.sharding import full_of, reshard
from hf_ptq.model.units import Unit, split_units
from hf_ptq.model.views import WEIGHT, WeightView, weight_views
from hf_ptq.model.wrappers import named, named_tensors, unwrapped
from hf_ptq.quantization.algorithm import Max
from hf_ptq.quantization.assignment import Assignment, QuantizedWeight
from hf_ptq.quantization.attach import weight_quantizer_of
from hf_ptq.quantization.formats.ranges import Ranges
from hf_ptq.quantization.quantizer import Quantizer
from hf_ptq.quantization.recipe import Recipe
from hf_ptq.quantization.rules import Rule
from hf_ptq.quantization.state import Record, needs_record
from hf_ptq.report import Report
from hf_ptq.wording import in_own_words

PROBED_ROWS = (0, 1, -1)  # of a weight, to see whether it was trained


@in_own_words
def decide_plan(
    source: str | Path,
    state: DistributedState,
    *,
    ep_degree: int | None = None,
    dense: str | None = None,
    use_fsdp2: bool = False,
    trust_remote_code: bool = False,
) -> Plan:
    """How the command would lay the model of `source` over the ranks of `state` (of `distributed_run`).

    Raises UserError where options, variables and the number of ranks do not go together, or where it does not fit.
    """
    config = RunConfig(
        str(source), Path(), ep_degree=ep_degree, dense=dense, use_fsdp2=use_fsdp2, trust_remote_code=trust_remote_code
    )
    refuse_if_any([*config.problems(), *option_problems(config, state.launch)])
    report = _silent()
    opened = sourcing.open_on_all(config.model, None, trust_remote_code, state, report)
    return planning.plan_model(config, opened, state, report)[2]


@in_own_words
def load(source: str | Path, plan: Plan, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of `source`, laid out by `plan`, in the source's dtype, in eval mode, and frozen.

    Each rank reads its share; what is on the hub only, rank 0 downloads while the others wait. To train the model:
    `model.requires_grad_(True).train()`. Raises UserError where the plan, or a variable such as HF_PTQ_EP_DEGREE, asks
    to shard and no process group is set up, or a rank does not see the source; RunError where the download fails.
    """
    is_grouped = dist.is_initialized()
    wishes = read_wishes(RunConfig(str(source), Path()), read_launch())
    asked = (
        [f"the plan is {plan.kind} over {plan.world_size} ranks"] if plan.world_size > 1 or plan.shards_model else []
    )
    asked += wishes.notes if (wishes.ep_degree or 1) > 1 or wishes.dense == "fsdp" else ()
    if not is_grouped and asked:
        cure = "call it inside of hf_ptq.distributed_run(), in a script that torchrun starts"
        raise UserError(*(Problem(f"{what}, but no process group is set up", cure) for what in asked))
    state = current_state(torch.device(plan.device))
    if state.world_size != plan.world_size:
        what = f"the plan is for {plan.world_size} ranks, the process group has {state.world_size}"
        raise UserError(Problem(what, "decide the plan with the state of this group"))
    if state.device.type == "cuda" and state.world_size > 1:
        state = replace(state, device=torch.device("cuda", torch.cuda.current_device()))
    report = _silent()
    opened = sourcing.open_on_all(str(source), None, trust_remote_code, state, report)
    opened = sourcing.fetch_weights(state, opened, report)
    meta = build_meta_model(opened, None, trust_remote_code)
    use_our_experts(meta.model, "grouped_mm")
    nothing = Assignment((), (), None, ())
    job = driver.Job(opened, meta, split_units(meta.model, meta.placements), nothing, Max(), state, plan, None, None)
    with SourceReader(opened) as reader:
        driver.load(job, driver.lay_out(job, {}), reader, report)
    return meta.model


@in_own_words
def export(
    model: torch.nn.Module,
    source: str | Path,
    directory: str | Path,
    *,
    overwrite: bool = False,
    max_shard_bytes: int = 5_000_000_000,
    trust_remote_code: bool = False,
) -> Report:
    """Write the checkpoint that servers load; returns the report, which is also in `directory`.

    `model`: a transformers model quantized by `quantize` or `restore_quantizers`, trained or not, wrapped or sharded by
    FSDP2 or not; every rank calls it. `source`: the checkpoint that the model was loaded from. Weights are encoded from
    the parameters as they are stored: a mixed-precision policy of FSDP2 that rounds them for the forward first is not
    followed, and a code may then be another than the one that was trained with. Raises UserError where
    the model is not that of the source, or is quantized in a way that no server loads; RunError where verification
    fails. Nothing is left behind then.
    """
    root, record = unwrapped(model), needs_record(model)
    if not isinstance(root, PreTrainedModel) or record.assignment is None:
        what = f"a {type(root).__name__} has no layout that servers load; it is no transformers model"
        raise UserError(Problem(what, "save it with hf_ptq.model_state and hf_ptq.quantizer_state"))
    reshard(root)  # what FSDP2 has gathered is neither DTensors nor there to stay
    device = next(p.device for p in root.parameters())
    state, report = current_state(device), _silent()
    if state.world_size > 1 and "cpu" not in (backends := dist.get_backend_config(dist.group.WORLD)):
        what = f"ranks agree on an export over a group that reaches CPUs, the default group is {backends}"
        raise UserError(Problem(what, 'init_process_group("cpu:gloo,cuda:nccl"), or hf_ptq.distributed_run()'))
    config = RunConfig(
        str(source), Path(directory), overwrite=overwrite, max_shard_bytes=max_shard_bytes,
        trust_remote_code=trust_remote_code, durable=False, skip_generate=True, device=device.type,
    )  # fmt: skip
    with report.stage("plan"):
        job, planned = _prepare(root, record, config, state, report)
    share = Share(state.rank, job.plan, planned.owners, _held(root, job.plan, state))
    found = {quantizer.key: quantizer for quantizer in quantizers(model).values() if not quantizer.is_weight}
    with (
        SourceReader(job.source) as reader,
        SharedDestination(state, config.export_path, config.overwrite, report) as destination,
    ):
        place = destination.directory
        with steps.writer_for(job, planned, place) as writer:
            output = Output(planned.layout, share, writer, job.source)
            memory = _Memory(job, share, writer, reader)
            with report.stage("quantize"):
                from_memory = driver.FromMemory(memory.ranges_of, memory.write_unit)
                errors = driver.quantize(job, output, reader, False, report, from_memory)
            with report.stage("export"):
                steps.write_scales(job, output, found, report)
                checksums = together(state, "finish the files", lambda: writer.finish(config.durable))
                sidecars = steps.write_files(job, planned, place, report)
        untrained = [error for error in _samples(errors) if error.module not in memory.trained]
        with report.stage("verify"):
            steps.verify(job, planned, steps.Written(untrained, checksums, sidecars), place, reader, report)
        steps.gather_warnings(state, report)
        errors = steps.gather_errors(job, errors)
        first_decides(state, "write the report", lambda: steps.finish_report(config, errors, place, report))
        destination.commit(config.durable)
    return report


def _prepare(
    root: PreTrainedModel, record: Record, config: RunConfig, state: DistributedState, report: Report
) -> tuple[driver.Job, planning.ExportPlan]:
    """Everything that can be refused, before anything is written."""
    source = sourcing.resolve(config, state, report)
    meta = build_meta_model(source, None, config.trust_remote_code)
    together(state, "compare the model with the source", lambda: refuse_if_any(_other_model(meta, root)))
    units = split_units(meta.model, meta.placements)
    plan, recipe = _plan_of(root, state), _recipe_now(record, root)
    assignment, planned = together(
        state, "plan the export", lambda: planning.plan_export(config, recipe, source, meta, units, plan, report)
    )
    together(state, "compare the quantizers", lambda: refuse_if_any(_other_quantizers(assignment, root)))
    source = sourcing.fetch_weights(state, source, report)
    meta = replace(meta, model=root)
    return driver.Job(source, meta, units, assignment, recipe.algorithm, state, plan, None, None), planned


def _silent() -> Report:
    return Report(Console(quiet=True), verbose=False)


def _samples(errors: list[WeightError]) -> list[WeightError]:
    """Those that are read back from the files."""
    chosen = [error for members in by_kind(errors).values() for error in (members[0], worst_of(members))]
    return list(dict.fromkeys(chosen))


# --- the model in place of the source --------------------------------------------------------------


@dataclass
class _Memory:
    """Ranges and unquantized tensors from the model; notes down which weights differ from the source's."""

    job: driver.Job
    share: Share
    writer: ShardWriter
    reader: SourceReader
    trained: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        job = self.job
        self.modules, self.tensors = named(job.model), named_tensors(job.model)
        views = weight_views(job.meta.placements, job.source.tensors, job.meta.stacking, job.meta.fused)
        self.view_of: dict[str, WeightView] = {module: view for view in views for module in view.modules}

    def ranges_of(self, values: Mapping[QuantizedWeight, torch.Tensor]) -> dict[QuantizedWeight, Ranges]:
        """The ranges of the quantizers, of the experts that are here; `values`: the weights, whole or these experts."""
        ranges: dict[QuantizedWeight, Ranges] = {}
        for weight, tensor in values.items():
            quantizer = weight_quantizer_of(self.modules[weight.view.owner], weight)
            assert quantizer.amax is not None
            amax, blocks = quantizer.amax.detach().to(tensor.device), quantizer.block_amax
            if weight.view.is_stacked:
                held = self.share.held_modules(weight.view)
                amax = amax[held.start : held.stop]
                blocks = None if blocks is None else blocks[held.start : held.stop]
                pairs = zip(weight.view.modules[held.start : held.stop], tensor, strict=True)
            else:
                pairs = zip(weight.view.modules, [tensor], strict=True)
            ranges[weight] = Ranges(amax, None if blocks is None else blocks.to(tensor.device))
            self.trained |= {module for module, own in pairs if self._differs(module, own)}
        return ranges

    def _differs(self, module: str, weight: torch.Tensor) -> bool:
        stored = self.reader.tensor(module + WEIGHT)
        rows = [row for row in PROBED_ROWS if row < len(weight)]
        return any(not torch.equal(stored[row].to(weight.dtype), weight[row].cpu()) for row in rows)

    def write_unit(self, unit: Unit) -> None:
        """Every rank calls it, for the same units in the same order: what is sharded is gathered."""
        names = unquantized_of(unit, self.job.assignment)
        for name, tensor in self._values(names):
            if self.share.writes(name):
                entry = self.reader.source.tensors[name]
                stored = None if tensor is None else self.reader.tensor(name)[...]
                if tensor is None or torch.equal(stored.to(tensor.dtype), tensor.cpu()):  # type: ignore[union-attr]
                    self.writer.copy(name, self.reader.path(entry), entry.offset)
                else:
                    self.writer.write(name, tensor.to(TORCH_DTYPES[entry.dtype]))

    @torch.no_grad()
    def _values(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Source tensor -> what the model holds in its place; None where it holds nothing."""
        placements = self.job.meta.placements
        by_parameter: dict[str | None, list[str]] = {}
        for name in names:
            by_parameter.setdefault(placements[name].parameter, []).append(name)
        for parameter, members in by_parameter.items():
            if parameter is None or parameter not in self.tensors:
                yield from ((name, None) for name in members)
                continue
            whole = full_of(self.tensors[parameter].detach())
            if placements[members[0]].pattern is None:
                yield from ((name, whole) for name in members)
            elif all(name.removesuffix(WEIGHT) in self.view_of for name in members):
                views = [self.view_of[name.removesuffix(WEIGHT)] for name in members]
                indices = [
                    view.modules.index(name.removesuffix(WEIGHT)) for view, name in zip(views, members, strict=True)
                ]
                yield from ((n, v.of(whole)[i]) for n, v, i in zip(members, views, indices, strict=True))
            else:
                originals = original_tensors(self.job.model, {parameter: whole})
                yield from ((name, originals.get(name)) for name in members)


# --- what the model is -----------------------------------------------------------------------------


def _other_model(meta: MetaModel, model: PreTrainedModel) -> Iterator[Problem]:
    """Where the model in memory is not the one that the source's configuration describes."""
    wanted, own = named_tensors(meta.model), named_tensors(model)
    cure = "give the checkpoint that this model was loaded from"
    for name in list(wanted.keys() ^ own.keys())[:5]:
        yield Problem(f"{name} is in {'the source' if name in wanted else 'the model'} only", cure)
    for name in wanted.keys() & own.keys():
        if wanted[name].shape != own[name].shape:
            shapes = f"{list(own[name].shape)} in the model, {list(wanted[name].shape)} in the source"
            yield Problem(f"{name} has the shape {shapes}", cure)


def _other_quantizers(assignment: Assignment, model: PreTrainedModel) -> Iterator[Problem]:
    """Weights that the recipe quantizes under the source's names, and the model does not, or otherwise."""
    modules = named(model)
    for weight in assignment.quantized:
        module = modules[weight.view.owner]
        leaf = weight.view.parameter.rpartition(".")[2]
        present = [q for q in module.children() if isinstance(q, Quantizer) and q.slot.leaf == leaf]
        if not any(q.format == weight.weight and q.is_enabled for q in present):
            what = (
                f"{weight.view.parameter} is to be {weight.weight.name}, as the recipe says of {weight.view.modules[0]}"
            )
            yield Problem(f"{what}, the model has no such quantizer", "write patterns on the model's own names")


def _recipe_now(record: Record, model: PreTrainedModel) -> Recipe:
    """The recipe, and rules for what has been switched off since. Raises UserError for a part of the KV cache."""
    assert record.assignment is not None
    found = {quantizer.key: quantizer for quantizer in quantizers(model).values() if not quantizer.is_weight}
    modules = named(model)
    rules = list(record.recipe.rules)
    for weight in record.assignment.quantized:
        keeps_weight = weight_quantizer_of(modules[weight.view.owner], weight).is_enabled
        keeps_input = weight.input is None or found[weight.input_key].is_enabled
        if not keeps_weight:
            rules.append(Rule(pattern=weight.view.modules, enable=False))
        elif not keeps_input:
            rules.append(Rule(pattern=weight.view.modules, weight=weight.weight.name))
    cache = record.assignment.kv
    if cache is not None:
        own = [q for layer in cache.layers.values() for q in (found.get(f"{layer}.k"), found.get(f"{layer}.v")) if q]
        off = [quantizer for quantizer in own if not quantizer.is_enabled]
        if off and len(off) < len(own):
            what = f"{len(off)} of {len(own)} quantizers of keys and values are off, such as that of {off[0].key}"
            raise UserError(Problem(what, "servers have one format for all layers: switch all of them off, or none"))
        if off:
            rules = [kept for rule in rules if (kept := rule.without_cache()) is not None]
    return replace(record.recipe, rules=tuple(rules))


def _plan_of(model: PreTrainedModel, state: DistributedState) -> Plan:
    """How the model lies on the ranks. Raises UserError where it is sharded in a way that cannot be exported."""
    sharded = {name: p for name, p in named_tensors(model).items() if isinstance(p, DTensor)}
    for name, parameter in sharded.items():
        mesh, placements = parameter.device_mesh, parameter.placements
        if mesh.size() != state.world_size or tuple(placements) != (Shard(0),):
            what = f"{name} lies as {placements} on a mesh of {mesh.size()} of {state.world_size} ranks"
            raise UserError(Problem(what, "shard with fully_shard over all ranks, or gather the model before"))
    device, world = str(state.device), state.world_size
    if sharded:
        return Plan("fsdp2", device, 0, (), world, dense="fsdp")
    return Plan("replicated" if world > 1 else "single", device, 0, (), world)


def _held(model: PreTrainedModel, plan: Plan, state: DistributedState) -> dict[str, range]:
    """Parameter -> the part of its first dimension that is here, where that is not all."""
    sharded = {name: p for name, p in named_tensors(model).items() if isinstance(p, DTensor)}
    return {name: plan.held_rows(parameter.shape[0], state.rank) for name, parameter in sharded.items()}
