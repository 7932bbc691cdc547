"""One run, as a page: from options to a checked export.

The numbered steps are those of the design. Everything up to step 5 reads headers and configuration only, also of a
model on the hub; a dry run ends there. The export grows in a temporary directory while the model is quantized, and gets
its final name only after verification. Every rank of a run executes this page; where they wait for each other is inside
the steps.
"""

from __future__ import annotations

import torch
from rich.console import Console

from hf_ptq import driver, planning, sourcing, steps
from hf_ptq.checkpoint.slices import SourceReader
from hf_ptq.config import RunConfig
from hf_ptq.distributed.agreement import first_decides, together
from hf_ptq.distributed.launch import read_launch
from hf_ptq.distributed.process_group import distributed_run
from hf_ptq.export.shared_destination import SharedDestination
from hf_ptq.export.tensors import Output
from hf_ptq.report import Report


def run(config: RunConfig, report: Report | None = None) -> Report:
    """Carry out one request; returns the report, which is also in the export.

    Raises UserError (wrong request) or RunError (failed run); of several ranks all call it, and one error ends them.
    """
    report = report or Report(Console(quiet=True) if read_launch().rank else None, config.verbose)
    report.record("options", config.as_dict())  # 1
    with (
        distributed_run(config.device, config.timeout_minutes, config.use_fsdp2) as state,  # 2
        steps.watched(state, report) as monitor,
        state.failing_together(),
    ):
        torch.manual_seed(config.seed)
        source = sourcing.resolve(config, state, report)  # 3
        meta, units, plan = planning.plan_model(config, source, state, report)  # 4
        steps.watch_map(monitor, plan, report)
        recipe = together(state, "read the recipe", lambda: planning.read_recipe(config))  # 5
        assignment, export = together(
            state, "plan the export", lambda: planning.plan_export(config, recipe, source, meta, units, plan, report)
        )
        if config.dry_run:
            return planning.end_dry_run(config, assignment, export, report)
        data, tokenizer = planning.read_data(config, state, source, meta, assignment, report)
        source = sourcing.fetch_weights(state, source, report)
        job = driver.Job(source, meta, units, assignment, recipe.algorithm, state, plan, data, tokenizer)
        with (
            SourceReader(source) as reader,
            SharedDestination(state, config.export_path, config.overwrite, report) as destination,
            state.failing_together(),
        ):
            directory = destination.directory
            share = driver.lay_out(job, export.owners)
            with steps.stage(state, report, "load"):  # 6
                driver.load(job, share, reader, report)
            before = steps.preview_before(config, job, report)  # 7
            quantizers = driver.attach(job)
            if data is not None:
                with steps.stage(state, report, "calibrate"):  # 8
                    driver.calibrate(job, quantizers, config.batch_size, report)
            with steps.writer_for(job, export, directory) as writer, state.failing_together():
                output = Output(export.layout, share, writer, source)
                with steps.stage(state, report, "quantize"):  # 9
                    errors = driver.quantize(job, output, reader, not config.skip_generate, report)
                steps.preview_after(config, job, quantizers, before, report)
                with steps.stage(state, report, "export"):  # 10
                    steps.write_scales(job, output, quantizers, report)
                    checksums = together(state, "finish the files", lambda: writer.finish(config.durable))
                    report.record("written", {"fsync_seconds": round(writer.fsync_seconds, 3)})
                    sidecars = steps.write_files(job, export, directory, report)
            with steps.stage(state, report, "verify"):  # 11
                steps.verify(job, export, steps.Written(errors, checksums, sidecars), directory, reader, report)
            steps.record_ranks(job, export, report)
            steps.gather_warnings(state, report)
            errors = steps.gather_errors(job, errors)
            first_decides(state, "write the report", lambda: steps.finish_report(config, errors, directory, report))
            destination.commit(config.durable)
    steps.show_report(config, state, errors, report)  # 12
    return report
