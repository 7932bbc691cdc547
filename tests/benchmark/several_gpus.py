"""Time several ranks beside one on the same tokens, compare what they export, and print one table for RESULTS.md.

    python tests/benchmark/several_gpus.py MODEL DIRECTORY --ranks 2
    python tests/benchmark/several_gpus.py MODEL DIRECTORY --ranks 4 8 --plans ep ep-sharded ep-groups fsdp2

Each run is a process of bench_hf_ptq.py that does its work twice; the second, warm, time counts. What one run leaves to
be written to the disk is flushed before the next one starts. Words that are not options of this script go to
bench_hf_ptq.py (on a CPU: --device cpu --samples 8 --seq 64). The exit code is 1 if a run failed or an export differs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compare_exports import LARGEST, compare, read

BENCH = Path(__file__).with_name("bench_hf_ptq.py")
STAGES = ("load", "calibrate", "quantize", "export", "verify")
PLANS = {
    "ep": lambda ranks: (),
    "ep-sharded": lambda ranks: ("--dense", "fsdp"),
    "ep-groups": lambda ranks: ("--ep-degree", str(ranks // 2)),
    "fsdp2": lambda ranks: ("--use-fsdp2",),
    "replicated": lambda ranks: ("--ep-degree", "1"),
}


def arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="what make_model.py wrote")
    parser.add_argument("directory", type=Path, help="for exports and records; exports are deleted when compared")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--plans", nargs="+", choices=list(PLANS), default=["ep", "fsdp2"])
    parser.add_argument("--formats", nargs="+", choices=("nvfp4", "fp8"), default=["nvfp4", "fp8"])
    return parser.parse_known_args(argv)


def bench(options: argparse.Namespace, ranks: int, export: Path, words: Sequence[str]) -> dict[str, Any] | None:
    """The record of the second of two runs; None if they failed."""
    records = export.with_name(f"{export.name}.jsonl")
    records.unlink(missing_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, BENCH, options.model, export, "--previews", "--no-fsync", "--keep", *words]
    visible = {} if ranks > 1 else {"CUDA_VISIBLE_DEVICES": "0"}
    os.sync()
    done = subprocess.run(
        [*map(str, command), "--repeat", "2"], env={**os.environ, **visible, "RESULTS": str(records)}, check=False
    )
    lines = records.read_text(encoding="utf-8").splitlines() if records.is_file() else []
    return json.loads(lines[-1]) if done.returncode == 0 and lines else None


def row(name: str, ranks: int, record: dict[str, Any] | None, one: dict[str, Any], verdict: str) -> str:
    """Seconds by stage, each with how many times as fast as one rank; peaks of rank 0 in GiB; how exports compare."""
    if record is None:
        return f"| {name} | failed |"

    def cell(now: float, then: float) -> str:
        return f"{now:.2f}" if record is one else f"{now:.2f} ({then / now:.2f})"

    seconds, base = record["stages"], one["stages"]
    cells = [cell(seconds[stage], base[stage]) for stage in STAGES]
    encode, encode_one = (r["stages"]["quantize"] + r["stages"]["export"] for r in (record, one))
    previews, previews_one = (r["stages"]["preview before"] + r["stages"]["preview after"] for r in (record, one))
    cells += [cell(encode, encode_one), cell(record["total_s"], one["total_s"]), cell(previews, previews_one)]
    peaks = [record[kind].get("all", 0.0) for kind in ("gpu_allocated_gib", "gpu_monitor_gib")]
    return " | ".join([f"| {name}", str(ranks), *cells, *(f"{peak:.1f}" for peak in peaks), verdict]) + " |"


def measure(options: argparse.Namespace, number_format: str, words: list[str]) -> tuple[list[str], bool]:
    """The rows of one format, and whether all went well."""
    first = options.directory / f"{number_format}-one"
    one = bench(options, 1, first, ["--fmt", number_format, *words])
    if one is None:
        return [f"| {number_format}, one | failed |"], False
    wanted, rows, well = read(first), [row(f"{number_format}, one", 1, one, one, "")], True
    for ranks in options.ranks:
        for plan in options.plans:
            export = options.directory / f"{number_format}-{plan}-{ranks}"
            record = bench(options, ranks, export, ["--fmt", number_format, *PLANS[plan](ranks), *words])
            verdict = ""
            if record is not None:
                differing, largest = compare(wanted, read(export))
                verdict = f"{len(differing)} of {len(wanted)} differ, activation scales by {largest:.1e}"
                well &= not differing and largest <= LARGEST
                shutil.rmtree(export)
            well &= record is not None
            rows.append(row(f"{number_format}, {plan}", ranks, record, one, verdict))
    shutil.rmtree(first)
    return rows, well


def main(argv: Sequence[str] | None = None) -> int:
    options, words = arguments(argv)
    options.directory.mkdir(parents=True, exist_ok=True)
    rows, well = [], True
    for number_format in options.formats:
        made, good = measure(options, number_format, words)
        rows, well = rows + made, well and good
    heads = ["", "ranks", *STAGES, "quantize + export", "total", "previews", "GiB, allocator", "GiB, in use", "export"]
    print("\n| " + " | ".join(heads) + " |\n" + "| --- " * len(heads) + "|\n" + "\n".join(rows))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
