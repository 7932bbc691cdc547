"""The steps of a run that are not work on units: each is one call of `run.py`.

They describe and record; the work itself is in the packages. Over several ranks each does its part, and rank 0 gets
what the others have to say. Nothing here is remembered between calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hf_ptq import preview
from hf_ptq.checkpoint.shards import INDEX_NAME, index_json, indexed
from hf_ptq.checkpoint.slices import SourceReader
from hf_ptq.checkpoint.writer import ShardWriter
from hf_ptq.config import RunConfig
from hf_ptq.distributed.agreement import first_decides, gather_json, least, together
from hf_ptq.distributed.plan import Plan
from hf_ptq.distributed.process_group import DistributedState
from hf_ptq.driver import Job
from hf_ptq.errors import RunError
from hf_ptq.export.config_files import write_json
from hf_ptq.export.samples import by_kind, decibels, read_samples, worst_of
from hf_ptq.export.shared_destination import unseen
from hf_ptq.export.sidecars import copy_sidecars
from hf_ptq.export.tensors import Output, WeightError, write_input_scales, write_kv_scales
from hf_ptq.export.verify import Expectation, Verified, verify_export
from hf_ptq.memory import MemoryMonitor, return_large_blocks
from hf_ptq.planning import ExportPlan
from hf_ptq.preview import Preview
from hf_ptq.quantization.apply import quantizing
from hf_ptq.quantization.quantizer import Quantizer
from hf_ptq.report import REPORT_FILE, Report
from hf_ptq.report_html import write_html

LOST_DB = 10.0  # NVFP4 has about 20, FP8 31; below this a server computes with noise
PREVIEW_TOKENS = 64
DEMO_PREVIEW_TOKENS = 32


@contextmanager
def stage(state: DistributedState, report: Report, name: str) -> Iterator[None]:
    """A stage of the run: timed, and named by messages about this rank."""
    state.enter(name)
    with report.stage(name):
        yield


@contextmanager
def watched(state: DistributedState, report: Report) -> Iterator[MemoryMonitor]:
    """Memory of the host, and of the main GPU, is sampled inside the block, and what is freed there is given back."""
    return_large_blocks()
    with MemoryMonitor(_uuids([str(state.device)]), _pinned_bytes) as monitor:
        monitor.set_baseline()
        report.attach_monitor(monitor)
        yield monitor


def watch_map(monitor: MemoryMonitor, plan: Plan, report: Report) -> None:
    """The other GPUs of a device map are sampled too from now on."""
    for note in monitor.watch(_uuids(dict.fromkeys(plan.device_map.values()))):
        report.say(note)


def _uuids(devices: Iterable[str]) -> dict[str, str]:
    """Of the GPUs among them."""
    return {name: str(torch.cuda.get_device_properties(name).uuid) for name in devices if name.startswith("cuda")}


def _pinned_bytes() -> int:
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


# --- previews --------------------------------------------------------------------------------------


def preview_before(config: RunConfig, job: Job, report: Report) -> Preview | None:
    """Step 7: what the model says unquantized."""
    if config.skip_generate:
        return None
    with stage(job.state, report, "preview before"):
        return _preview(config, job, report)


def preview_after(
    config: RunConfig, job: Job, quantizers: Mapping[str, Quantizer], before: Preview | None, report: Report
) -> None:
    """The same with rounded weights and activations; both go into the report side by side.

    Each rank has its own prompt; the report shows that of rank 0, and names the ranks whose text is broken.
    """
    if config.skip_generate:
        job.release()
        return
    with stage(job.state, report, "preview after"), quantizing(quantizers.values()):
        after = _preview(config, job, report)
    job.release()
    flaws = gather_json(job.state, [p.flaw if p else "" for p in (before, after)])
    for rank, (flaw_before, flaw_after) in enumerate(flaws):
        if flaw_after and not flaw_before:
            on = f" of rank {rank}" if job.state.world_size > 1 else ""
            report.warn(f"the preview{on} after quantization {flaw_after}, the one before it is not")
    report.record(
        "previews",
        {
            "prompt": before.prompt if before else None,
            "before": before.continuation if before else None,
            "after": after.continuation if after else None,
        },
    )


def _preview(config: RunConfig, job: Job, report: Report) -> Preview | None:
    row = job.data.rows[0] if job.data else None
    tokens = DEMO_PREVIEW_TOKENS if config.model == "demo" else PREVIEW_TOKENS
    lockstep = job.plan.shards_model and job.state.world_size > 1
    agree = (lambda count: least(job.state, count)) if lockstep else None
    return preview.preview(job.model, job.tokenizer, row, tokens, report, device=job.state.device, agree=agree)


# --- export ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """What was noted down while the export was written, by this rank."""

    errors: list[WeightError]
    checksums: dict[str, int]
    sidecars: list[Path]


def writer_for(job: Job, export: ExportPlan, directory: Path) -> ShardWriter:
    """The writer of this rank's files; its threads, and the bytes that may wait for them, fit the machine."""
    own = [shard for shard in export.shards if shard.owner == job.state.rank]
    cores = (os.cpu_count() or 4) // job.state.launch.local_world_size
    queued = job.source.total_bytes // (16 * job.state.world_size)
    return ShardWriter(directory, own, max(2, min(12, cores - 2)), max(16 << 20, min(256 << 20, queued)))


def write_scales(job: Job, output: Output, quantizers: Mapping[str, Quantizer], report: Report) -> None:
    """The calibrated scales: of activations, and of keys and values."""
    write_input_scales(job.assignment, quantizers, output)
    for warning in write_kv_scales(job.assignment, quantizers, output):
        report.warn(warning)


def write_files(job: Job, export: ExportPlan, directory: Path, report: Report) -> list[Path]:
    """Index, configuration files, and the source's side files byte for byte; returns the latter's paths.

    Rank 0 writes them, when every rank has finished its files.
    """

    def write() -> list[str]:
        if len(indexed(export.shards)) > 1:
            write_json(directory / INDEX_NAME, index_json(export.shards))
        for name, data in export.files.items():
            write_json(directory / name, data)
        sidecars = copy_sidecars(job.source, directory, report)
        unseen(directory / shard.file for shard in export.shards)  # verification names what is missing
        return [str(path) for path in sidecars]

    return [Path(path) for path in first_decides(job.state, "write the index and the configuration", write)]


def verify(
    job: Job, export: ExportPlan, written: Written, directory: Path, reader: SourceReader, report: Report
) -> None:
    """Step 11: what lies in the files is what was meant. Raises RunError with everything that is not.

    Each rank reads back what it wrote; rank 0 looks at the whole.
    """
    expectation = Expectation(export.files, export.layout, export.contents, export.scales, written.sidecars)

    model = job.assignment, export.layout, job.meta.dtype

    def check() -> dict[str, Any]:
        reader.refuse_changed()
        verified = verify_export(directory, export.shards, written.checksums, expectation, report, job.state.rank)
        own = [shard for shard in export.shards if shard.owner == job.state.rank]
        samples, problems = read_samples(directory, own, written.errors, reader, model)
        if problems:
            raise RunError(*problems)
        return {"verified": asdict(verified), "samples": [asdict(sample) for sample in samples]}

    told = gather_json(job.state, together(job.state, "verify", check))
    total = sum((Verified(**of_rank["verified"]) for of_rank in told), start=Verified())
    report.say(f"verified: {total}; {len(export.files)} config files")
    report.record("verified", {**asdict(total), "percent": total.percent})
    report.record("samples", [sample for of_rank in told for sample in of_rank["samples"]])


# --- the report ------------------------------------------------------------------------------------


def gather_errors(job: Job, errors: list[WeightError]) -> list[WeightError]:
    """The errors of all ranks, in the order of one process."""
    if job.state.world_size == 1:
        return errors
    told = gather_json(job.state, [asdict(error) for error in errors])
    found = {error["module"]: WeightError(**error) for of_rank in told for error in of_rank}
    return [found[module] for q in job.assignment.quantized for module in q.view.modules]


def gather_warnings(state: DistributedState, report: Report) -> None:
    """Rank 0's report gets what the others warn of and it does not."""
    for rank, warnings in enumerate(gather_json(state, report.warnings)):
        for warning in warnings:
            if warning not in report.warnings:
                report.warn(f"rank {rank}: {warning}")


def record_ranks(job: Job, export: ExportPlan, report: Report) -> None:
    """Per rank: where it ran, what it read to load the model and wrote, its peaks beside what the plan expected."""
    state = job.state
    if state.world_size == 1:
        return
    peaks = [entry.get("host_peak_bytes") for entry in report.stages]
    gpu = [used for entry in report.stages for used in (entry.get("gpu_peak_bytes") or {}).values()]
    own = {
        "rank": state.rank,
        "node": state.launch.name.partition("(")[2].rstrip(")"),
        "rows": len(job.data.rows) if job.data else 0,
        "read bytes": report.sections["loaded"]["bytes"],
        "written bytes": sum(shard.num_bytes for shard in export.shards if shard.owner == state.rank),
        "host peak bytes": max((peak for peak in peaks if peak is not None), default=None),
        "gpu peak bytes": max(gpu, default=None),
        "expected bytes": job.plan.expected_bytes,
    }
    report.record("ranks", gather_json(state, own))


def finish_report(config: RunConfig, errors: list[WeightError], directory: Path, report: Report) -> None:
    """Signal-to-noise by kind of layer, what lies in the export, and where it will be; the report is its last file."""
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
    write_json(directory / REPORT_FILE, report.as_dict())


def show_report(config: RunConfig, state: DistributedState, errors: list[WeightError], report: Report) -> None:
    """Step 12, on rank 0: the summary on the screen, and the page if one is asked for."""
    if not state.is_first:
        return
    report.print_summary()
    if config.report_html is not None:
        write_html(config.report_html, report.as_dict(), errors)
