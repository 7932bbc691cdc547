"""The demo, a real language model on a CPU: the command as the README has it, and every preset."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from decoding import judge

from hf_ptq.quantization.recipe import list_presets, load_recipe

pytestmark = pytest.mark.demo
EXPERTS_ONLY = ("nvfp4_experts_only",)
PRESETS = [name for name, _ in list_presets() if name not in (*EXPERTS_ONLY, "nvfp4")]
LEAST_DB = {"fp8": 30, "fp8_per_channel_per_token": 30, "int8_weight_only": 35, "mxfp8": 30, "mxint8": 35, "mxfp6": 24}
# Others with 4 bits: 18.
LEAST_DB |= dict.fromkeys(("mxfp4", "mxfp4_mlp_weight_only", "w4a8_mxfp4_fp8", "int4_blockwise_weight_only"), 15)


@pytest.fixture
def source(demo_source: Path) -> Path:
    """The converted checkpoint in the cache."""
    return demo_source


def is_fluent(text: str) -> bool:
    """Words, most of them different, none of them said over and over; letters and signs of English."""
    words = text.split()
    plain = sum(c.isascii() for c in text) / max(1, len(text))
    return len(words) >= 12 and Counter(words).most_common(1)[0][1] <= len(words) / 3 and plain > 0.95


def test_what_is_fluent() -> None:
    assert is_fluent("The quickest way to understand how a bicycle stays upright is to ride one and to look down.")
    assert not is_fluent("")
    assert not is_fluent("the the the the the the the the the the the the the the")
    assert not is_fluent("\u0442\u0430\u043a " * 3 + " ".join("\u00e4\u00f6\u00fc" * i for i in range(1, 14)))


def test_the_readmes_command(tmp_path: Path, source: Path, check_export: Callable[[Path, Path], None]) -> None:
    out = tmp_path / "demo-nvfp4"
    command = [
        sys.executable, "-m", "hf_ptq", "--model", "demo", "--qformat", "nvfp4", "--export_path", str(out),
        "--device", "cpu",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    check_export(source, out)
    report = json.loads((out / "hf_ptq_report.json").read_text())
    previews = report["previews"]
    assert is_fluent(previews["before"]), previews
    assert is_fluent(previews["after"]), previews
    shown = [word for text in (previews["before"], previews["after"]) for word in text.split()[:8]]
    assert [word for word in shown if word not in done.stdout] == [], "both are on the screen"
    assert [(use["name"], use["rows"], use["tokens"]) for use in report["data"]["datasets"]] == [("pydoc", 8, 8 * 512)]
    assert sum(stage["seconds"] for stage in report["stages"]) < 180
    assert all(row["worst dB"] > 18 for row in report["signal_to_noise"].values())


@pytest.mark.parametrize("preset", PRESETS)
def test_other_presets(
    preset: str, source: Path, quantize: Callable[..., Path], check_export: Callable[..., None]
) -> None:
    out = quantize("demo", preset, datasets=("pydoc",), calib_sizes=(2,), calib_seq=128)
    (weight,) = {rule.weight for rule in load_recipe(preset).rules if rule.weight}
    judge(source, out, weight, check_export, only=lambda module: ".layers.7.mlp." in module)
    report = json.loads((out / "hf_ptq_report.json").read_text())
    assert all(row["worst dB"] > LEAST_DB.get(preset, 18) for row in report["signal_to_noise"].values()), report
