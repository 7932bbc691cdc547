"""Time hf-ptq on the synthetic model and the tokens with which the peers were measured.

python tests/benchmark/bench_hf_ptq.py MODEL OUT --fmt nvfp4|fp8 [--repeat 2]; see README.md beside this file.
Over several ranks: torchrun --nproc_per_node 2 tests/benchmark/bench_hf_ptq.py ...; rank 0 tells its stages.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START = time.perf_counter()  # before torch and transformers: they are imported where they are timed
ROOT = Path(__file__).resolve().parents[2]
TIMED = ("load", "calibrate", "quantize", "export", "verify")  # these make the total
GIB = 2**30
RANK = int(os.environ.get("RANK", "0"))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="what make_model.py wrote")
    parser.add_argument("out", type=Path, help="the export; the token file goes beside it")
    parser.add_argument("--fmt", choices=("nvfp4", "fp8"), default="nvfp4")
    parser.add_argument("--kv", default="fp8_cast", help="KV-cache preset")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=0, help="0: hf-ptq chooses")
    parser.add_argument("--experts", help="kernel of the experts: grouped_mm (default) | eager")
    parser.add_argument("--ep-degree", type=int, help="as hf-ptq's")
    parser.add_argument("--dense", help="as hf-ptq's: replicated | fsdp")
    parser.add_argument("--use-fsdp2", action="store_true", help="as hf-ptq's")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeat", type=int, default=1, help="runs in this process; from the second on it is warm")
    parser.add_argument("--previews", action="store_true", help="generate before and after")
    parser.add_argument("--no-fsync", action="store_true", help="as the peers, which leave it to the system")
    parser.add_argument("--warm", action="store_true", help="read the model once before, into the page cache")
    parser.add_argument("--keep", action="store_true", help="do not delete the export")
    parser.add_argument("--report-html", type=Path, help="the run's page with plots")
    bench = Path(os.environ.get("HF_PTQ_BENCH", ROOT.parent / "shared" / "bench"))
    parser.add_argument("--bench", type=Path, default=bench, help="directory of common.py (default: %(default)s)")
    return parser.parse_args(argv)


def token_file(options: argparse.Namespace, common: Any) -> Path:
    """The tokens of every tool, as a .safetensors of input_ids int64 [samples, seq]; made once."""
    from safetensors.torch import save_file

    vocabulary = json.loads((options.model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    path = options.out.absolute().parent / f"tokens-{vocabulary}-{options.samples}x{options.seq}.safetensors"
    while RANK and not path.is_file():
        time.sleep(0.2)  # rank 0 makes it
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        save_file({"input_ids": common.tokens(vocabulary, options.samples, options.seq)}, partial)
        partial.replace(path)
    return path


def make_report(device: str) -> Any:
    """A `Report` that also keeps what PyTorch's allocator held at most in each stage, work on the GPU finished."""
    import torch
    from rich.console import Console

    from hf_ptq.report import Report

    class AllocatorReport(Report):
        @contextmanager
        def stage(self, name: str) -> Iterator[None]:
            if not device.startswith("cuda"):
                with super().stage(name):
                    yield
                return
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            with super().stage(name):
                entry = self.stages[-1]
                yield
                torch.cuda.synchronize()
            entry["gpu_allocated_peak_bytes"] = torch.cuda.max_memory_allocated()

    return AllocatorReport(Console(quiet=True), verbose=False)


def measure(options: argparse.Namespace, tokens: Path, common: Any) -> tuple[dict[str, Any], Any]:
    """One run: (what was measured, its report)."""
    from hf_ptq.config import RunConfig
    from hf_ptq.run import run

    config = RunConfig(
        model=str(options.model),
        export_path=options.out,
        qformat=options.fmt,
        kv_cache_qformat=options.kv,
        overwrite=True,
        durable=not options.no_fsync,
        datasets=(str(tokens),),
        calib_sizes=(options.samples,),
        calib_seq=options.seq,
        batch_size=options.batch_size,
        device=options.device,
        experts_implementation=options.experts,
        ep_degree=options.ep_degree,
        dense=options.dense,
        use_fsdp2=options.use_fsdp2,
        skip_generate=not options.previews,
        report_html=options.report_html,
        verbose=False,
    )
    report = make_report(options.device)
    watch = common.RssWatch()
    begin = time.perf_counter()
    run(config, report)
    seconds = time.perf_counter() - begin
    os.sync()
    synced = time.perf_counter() - begin - seconds
    return {"run_s": round(seconds, 3), "sync_after_s": round(synced, 3), "process_host": watch.done()}, report


def result(report: Any) -> dict[str, Any]:
    """The stages of a report, as the peers' scripts tell them. Memory in GiB."""
    told = report.as_dict()
    stages: dict[str, float] = {}
    for stage in told["stages"]:
        stages[stage["name"]] = round(stages.get(stage["name"], 0.0) + stage["seconds"], 3)
    total = sum(stages.get(name, 0.0) for name in TIMED)
    verify = stages.get("verify", 0.0)
    return {
        "stages": stages,
        "total_s": round(total, 3),
        "verify_s": verify,
        "total_without_verify_s": round(total - verify, 3),
        "fsync_s": found(told, "fsync_seconds"),
        "batch_size": told.get("batch_size"),
        "gpu_allocated_gib": peaks(told, "gpu_allocated_peak_bytes"),
        "gpu_monitor_gib": peaks(told, "gpu_peak_bytes"),
        "host_held_gib": peaks(told, "host_peak_bytes"),  # anonymous and pinned, above the start
        "bytes": told.get("bytes"),
        "plan": told["plan"]["kind"],
        "ranks": told.get("ranks"),
        "warnings": told["warnings"],
        "versions": told["versions"],
    }


def found(told: Any, key: str) -> Any:
    """The first value of that name anywhere in a report; None if it was not recorded."""
    if not isinstance(told, dict):
        return None
    if key in told:
        return told[key]
    return next((value for value in (found(item, key) for item in told.values()) if value is not None), None)


def peaks(told: dict[str, Any], key: str) -> dict[str, float]:
    """Stage -> the largest peak in GiB, and `all`: the largest of all."""
    most: dict[str, float] = {}
    for stage in told["stages"]:
        value = stage.get(key)
        value = max(value.values(), default=None) if isinstance(value, dict) else value
        if value is not None:
            most[stage["name"]] = max(most.get(stage["name"], 0.0), round(value / GIB, 3))
    return {**most, "all": max(most.values())} if most else {}


def show(record: dict[str, Any]) -> None:
    print(f"\n{record['model']} {record['fmt']} {record['plan']} run {record['run']} of {record['runs']}")
    print(f"{'stage':<16}{'seconds':>9}{'allocated':>11}{'GPU used':>10}{'host held':>11}   GiB")
    for name, seconds in [*record["stages"].items(), ("all", record["total_s"])]:
        sizes = (record[kind].get(name) for kind in ("gpu_allocated_gib", "gpu_monitor_gib", "host_held_gib"))
        cells = ("-" if size is None else f"{size:.2f}" for size in sizes)
        label = "total" if name == "all" else name if name in TIMED else f"({name})"
        print(f"{label:<16}{seconds:>9.2f}" + "".join(f"{c:>{w}}" for c, w in zip(cells, (11, 10, 11), strict=True)))
    outside = record["run_s"] - sum(record["stages"].values())
    print(f"{'without verify':<16}{record['total_without_verify_s']:>9.2f}")
    print(
        f"whole run {record['run_s']:.2f} s ({outside:.2f} s of it outside the stages), "
        f"imports {record['import_s']:.2f} s, process {record['process_s']:.2f} s, "
        f"fsync {'not recorded' if record['fsync_s'] is None else format(record['fsync_s'], '.2f') + ' s'}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if not (options.bench / "common.py").is_file():
        sys.exit(f"{options.bench} holds no common.py: give --bench DIR or set HF_PTQ_BENCH")
    sys.path.insert(0, str(options.bench))
    common: Any = importlib.import_module("common")
    importlib.import_module("hf_ptq.run")
    imports = time.perf_counter() - START
    tokens = token_file(options, common)
    if options.warm and RANK == 0:
        common.warm(options.model)
    prepared = time.perf_counter() - START - imports
    for index in range(options.repeat):
        measured, report = measure(options, tokens, common)
        record = {
            "tool": "hf-ptq", "model": options.model.name, "fmt": options.fmt, "kv": options.kv,
            "samples": options.samples, "seq": options.seq, "device": options.device, "experts": options.experts,
            "durable": not options.no_fsync, "previews": options.previews, "run": index + 1, "runs": options.repeat,
            "import_s": round(imports, 3), **measured, **result(report),
            # of a process that had only this run to do, the benchmark's own preparation left out
            "process_s": round(imports + measured["run_s"], 3),
            "prepare_s": round(prepared, 3), "ok": True,
        }  # fmt: skip
        if RANK == 0:
            show(record)
            common.emit(record)
        del report
        gc.collect()
        empty_cache(options.device)
    if not options.keep and RANK == 0:
        shutil.rmtree(options.out)
    return 0


def empty_cache(device: str) -> None:
    """The next run allocates anew: what stays warm is code, not memory."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
