"""The benchmark runs and tells what its README says; no time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from conftest import ROOT, SHARED

BENCH = SHARED / "bench"
SCRIPT = ROOT / "tests" / "benchmark" / "bench_hf_ptq.py"


@pytest.mark.skipif(not (BENCH / "make_model.py").is_file(), reason="no shared/bench (set HF_PTQ_SHARED)")
def test_two_runs_on_the_tiny_model(tmp_path):
    model, out = tmp_path / "model", tmp_path / "out"
    make = [sys.executable, str(BENCH / "make_model.py"), "tiny", str(model), "--device", "cpu"]
    subprocess.run(make, check=True, capture_output=True)
    bench = [sys.executable, str(SCRIPT), str(model), str(out), "--bench", str(BENCH)]
    small = ["--device", "cpu", "--samples", "4", "--seq", "32", "--repeat", "2", "--no-fsync", "--fmt", "nvfp4"]
    done = subprocess.run([*bench, *small], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert [record["run"] for record in records] == [1, 2]
    for record in records:
        assert {"load", "calibrate", "quantize", "export", "verify"} <= set(record["stages"])
        assert record["total_s"] == pytest.approx(record["total_without_verify_s"] + record["verify_s"], abs=0.01)
        assert record["process_s"] > record["import_s"] > 0
        assert 0 < record["bytes"]["export_bytes"] < record["bytes"]["source_bytes"]
        # A second run may live in memory that the first one gave back to the process: it holds nothing on top.
        assert record["host_held_gib"]["all"] >= 0
    assert (tmp_path / "tokens-2048-4x32.safetensors").is_file()
    assert not out.exists()
