"""One run, as a page: from options to a checked export.

The numbered steps are those of the design. Everything up to step 5 reads headers and configuration only; a dry run
ends there. The export grows in a temporary directory while the model is quantized, and gets its final name only after
verification.
"""

from __future__ import annotations

from dataclasses import asdict

import torch

from hf_ptq import driver, steps
from hf_ptq.checkpoint.slices import SourceReader
from hf_ptq.checkpoint.writer import ShardWriter
from hf_ptq.config import RunConfig
from hf_ptq.distributed.agreement import together
from hf_ptq.distributed.process_group import distributed_run
from hf_ptq.export.destination import Destination
from hf_ptq.quantization.apply import attach_quantizers
from hf_ptq.report import Report
from hf_ptq.report_html import write_html


def run(config: RunConfig, report: Report | None = None) -> Report:
    """Carry out one request; returns the report, which is also in the export.

    Raises UserError where the request cannot be carried out, RunError where the run fails; nothing is left behind.
    """
    report = report or Report(verbose=config.verbose)
    report.record("options", asdict(config))  # 1
    with distributed_run(config.device) as state, steps.watched(state, report):  # 2
        torch.manual_seed(config.seed)
        source = together(state, "resolve the source", lambda: steps.resolve(config, report))  # 3
        meta, units = steps.plan_model(config, source, state, report)  # 4
        recipe, assignment, export = steps.plan_export(config, source, meta, units, report)  # 5
        if config.dry_run:
            return steps.end_dry_run(config, assignment, export, report)
        data, tokenizer = together(
            state, "read the data", lambda: steps.read_data(config, source, meta, assignment, report)
        )
        job = driver.Job(source, meta, units, assignment, recipe.algorithm, state.device, tokenizer)
        with SourceReader(source) as reader, Destination(config.export_path, config.overwrite, report) as destination:
            with report.stage("load"):  # 6
                driver.load(job, reader, report)
            before = steps.preview_before(config, job, data, report)  # 7
            quantizers = attach_quantizers(job.model, assignment)
            if data is not None:
                with report.stage("calibrate"):  # 8
                    driver.calibrate(job, quantizers, data, config.batch_size, report)
            with ShardWriter(destination.directory, export.shards, *steps.writing(source)) as writer:
                with report.stage("quantize"):  # 9
                    errors = driver.quantize(job, writer, reader, not config.skip_generate, report)
                steps.preview_after(config, job, quantizers, data, before, report)
                with report.stage("export"):  # 10
                    steps.write_scales(assignment, quantizers, writer, report)
                    checksums = writer.finish(config.durable)
                    report.record("written", {"fsync_seconds": round(writer.fsync_seconds, 3)})
                    sidecars = together(
                        state, "write configs", lambda: steps.write_files(source, export, destination, report)
                    )
            with report.stage("verify"):  # 11
                written = steps.Written(errors, checksums, sidecars)
                steps.verify(job, export, written, destination, reader, report)
            steps.record_results(errors, config, destination.directory, report)
            steps.write_report(destination, report)
            destination.commit(config.durable)
    report.print_summary()  # 12
    if config.report_html is not None:
        write_html(config.report_html, report.as_dict(), errors)
    return report
