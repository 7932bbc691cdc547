"""The three ways to start several ranks, word for word, each to an export that the checker takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from ranks import environment

TORCHRUN = Path(sys.executable).with_name("torchrun")
# Words after `torchrun --nproc_per_node 2`, and the directory to start from (None: an empty one).
WAYS = {
    "a file of the checkout": (["hf-ptq"], ROOT),
    "a module, from anywhere": (["-m", "hf_ptq"], None),
    "the installed command": (["--no-python", str(Path(sys.executable).with_name("hf-ptq"))], None),
}


@pytest.mark.parametrize("way", WAYS)
def test_started_as_the_readme_says(way, tiny, token_rows, tmp_path, check_export):
    words, directory = WAYS[way]
    out = tmp_path / "out"
    request = ["--pyt_ckpt_path", tiny("qwen3_moe"), "--qformat", "nvfp4", "--export_path", out]
    options = ["--dataset", token_rows, "--device", "cpu", "--skip_generate", "--no-durable"]
    done = subprocess.run(
        [str(TORCHRUN), "--standalone", "--nproc_per_node", "2", *words, *map(str, request + options)],
        cwd=directory or tmp_path, env=environment(), capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("exported:") == 1, "one rank speaks"
    assert "plan expert-parallel: 8 experts over 2 ranks: 4 each" in done.stdout
    assert done.stdout.count("rank 0 of 2 speaks") == 1, "whose share the amounts are"
    assert done.stdout.index("rank 0 of 2 speaks") < done.stdout.index("== load")
    told, stages = done.stdout.split("\nranks ")[1].split("\nstages of rank 0 ")
    assert "expected bytes" in told
    assert [line.split()[0] for line in told.splitlines()[3:5]] == ["0", "1"]
    assert "calibrate" in stages
    check_export(tiny("qwen3_moe"), out)
