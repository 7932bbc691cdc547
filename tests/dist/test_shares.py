"""What each rank reads, holds and exchanges: its share, and no more collectives the more experts there are (P7).

HF_PTQ_MEMORY_MB sets the size of the model (default 100). What does not grow with it (temporaries of a part, read
buffers, the allocator's reserve) is allowed for by FIXED_MB.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from ranks import run_requests
from tiny import save_tiny

MODEL_MB = int(os.environ.get("HF_PTQ_MEMORY_MB", "100"))
FIXED_MB = 130
SIZE, EXPERTS = 256, 32
LAYERS = max(2, round(MODEL_MB * 1e6 / (2 * EXPERTS * 3 * SIZE * SIZE)))


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A mixture of experts that is nearly all experts."""
    changes = {"hidden_size": SIZE, "moe_intermediate_size": SIZE, "num_experts": EXPERTS, "num_hidden_layers": LAYERS}
    return save_tiny("qwen3_moe", tmp_path_factory.mktemp("large") / "model", **changes)


def weights(source: Path) -> tuple[int, int]:
    """Bytes of the dense weights, and of the experts."""
    from hf_ptq.checkpoint.source import open_source
    from hf_ptq.report import Report

    entries = open_source(str(source), None, False, Report()).tensors.values()
    experts = sum(e.num_bytes for e in entries if ".experts." in e.name)
    return sum(e.num_bytes for e in entries) - experts, experts


@pytest.mark.parametrize(("ranks", "options"), [(2, {}), (4, {}), (2, {"use_fsdp2": True})])
def test_a_rank_reads_and_holds_its_share(ranks, options, large, token_rows, tmp_path):
    request = {
        "model": str(large), "export_path": tmp_path / "out", "qformat": "fp8", "datasets": [str(token_rows)],
        "device": "cpu", "durable": False, **options,
    }  # fmt: skip
    run_requests(ranks, [request], tmp_path)
    dense, experts = weights(large)
    held_dense = dense / ranks if options else dense
    # FSDP2 gathers a layer into one buffer and copies it into another, and the next one before this one is freed.
    gathered = 4 * experts / LAYERS if options else 0
    told = json.loads((tmp_path / "out" / "hf_ptq_report.json").read_text())["ranks"]
    assert len(told) == ranks
    for rank in told:
        # Gathered parameters are read by all; the rest of a share is exact. A row of a matrix may be one too many.
        assert rank["read bytes"] == pytest.approx(held_dense + experts / ranks, rel=0.01)
        print(f"{ranks} ranks: read {rank['read bytes'] / 1e6:.0f} MB, peak {rank['host peak bytes'] / 1e6:.0f} MB")
        assert rank["host peak bytes"] <= held_dense + experts / ranks + gathered + FIXED_MB * 1e6
    assert sum(rank["written bytes"] for rank in told) == sum(
        f.stat().st_size for f in (tmp_path / "out").glob("*.safetensors")
    )
    assert max(r["written bytes"] for r in told) <= 1.1 * min(r["written bytes"] for r in told)


@pytest.mark.parametrize("options", [{}, {"use_fsdp2": True}])
def test_collectives_do_not_grow_with_the_experts(options, token_rows, tmp_path):
    requests = []
    for experts in (4, 16):
        source = save_tiny("qwen3_moe", tmp_path / f"model-{experts}", num_experts=experts)
        out = tmp_path / f"out-{experts}"
        base = {
            "datasets": [str(token_rows)],
            "device": "cpu",
            "durable": False,
            "skip_generate": True,
            "batch_size": 4,
        }
        requests.append({"model": str(source), "export_path": out, "qformat": "nvfp4", **base, **options})
    run_requests(2, requests, tmp_path)
    counts = [json.loads((tmp_path / f"out-{experts}-rank1.json").read_text())["collectives"] for experts in (4, 16)]
    print(counts)
    assert counts[0] == counts[1]
    assert counts[0] > 10
