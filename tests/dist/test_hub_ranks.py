"""Two ranks from a hub id: rank 0 fetches, both plan with the same headers, and the export is that of a local run.

The library does the same: no rank looks for the room that another needs.
"""

from __future__ import annotations

import json
from pathlib import Path

from local_hub import REPO, Hub, environment, files_of
from ranks import differences, run_requests, torchrun
from safetensors.torch import load_file
from tiny import load_tensors, raw


def test_two_ranks_from_a_hub_id(tiny, token_rows, tmp_path):
    source = tiny("qwen3_moe")
    hub = Hub(files_of(source))
    base = {"device": "cpu", "durable": False, "verbose": False, "skip_generate": True, "datasets": [str(token_rows)]}
    try:
        made, planned = tmp_path / "made", tmp_path / "planned"
        variables = environment(tmp_path / "home", hub.url)
        dry = [{**base, "model": REPO, "export_path": planned, "dry_run": True}]
        run_requests(2, dry, tmp_path, **variables)
        assert hub.weights_given() == []
        assert not planned.exists()
        run_requests(2, [{**base, "model": REPO, "export_path": made}], tmp_path, **variables)
    finally:
        hub.stop()
    assert hub.weights_given() == sorted(path.name for path in source.glob("*.safetensors"))
    run_requests(0, [{**base, "model": str(source), "export_path": tmp_path / "local"}], tmp_path)
    assert differences(tmp_path / "local", made) == []
    for rank in range(2):
        told = json.loads((tmp_path / f"planned-rank{rank}.json").read_text())["source"]
        assert told["to_download"] == sum(path.stat().st_size for path in source.glob("*.safetensors"))


def test_the_library_downloads_on_one_rank_for_all(tiny, tmp_path):
    source, home = tiny("qwen3_moe"), tmp_path / "home"
    hub = Hub(files_of(source))
    try:
        worker = Path(__file__).with_name("hub_loading.py")
        done = torchrun(2, worker, REPO, home, tmp_path, seconds=300, **environment(home, hub.url))
    finally:
        hub.stop()
    assert done.returncode == 0, done.stdout + done.stderr
    weights = sorted(path.name for path in source.glob("*.safetensors"))
    assert hub.weights_given() == sorted(weights * 2)
    assert sorted(file for file, *_ in hub.ranges) == sorted(weights * 3), "for the plan, and for each load"
    told = sorted(tmp_path.glob("*-rank-*.safetensors"))
    assert len(told) == 4
    for file in told:
        assert raw(load_file(file)["norm"]) == raw(load_tensors(source)["model.norm.weight"])
