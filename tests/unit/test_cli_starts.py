"""The command line from outside: how fast it answers, what it imports, and how it is started."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import hf_ptq
from hf_ptq import cli
from hf_ptq.config import RunConfig
from hf_ptq.quantization.formats.description import FORMATS
from hf_ptq.quantization.recipe import DEFAULT_KV

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "datasets", "accelerate", "numpy", "pandas", "safetensors.torch")

# Runs main and says on the last line of standard output what it returned and which heavy modules it has loaded.
WATCHED_MAIN = f"""
import json, sys
from hf_ptq.cli import main
code = main(sys.argv[1:])
print(json.dumps([code, [name for name in {HEAVY!r} if name in sys.modules]]))
"""


QUICK = [
    ["--help"],
    ["--list"],
    ["--version"],
    ["--nosuch"],
    ["--export_fmt", "hf"],
    ["--batch_size", "x"],
    [],
    ["--model", "/nosuch/model", "--qformat", "nvfp5", "--device", "cuda:9", "--dataset", "nosuch", "--seed", "-1"],
]


@pytest.mark.parametrize("words", QUICK, ids=lambda words: " ".join(words[:2]) or "nothing")
def test_answers_within_a_second_and_without_torch(words, tmp_path):
    """Seconds are of processor time, and so do not depend on what else the machine does; alone it is the clock's."""
    clean = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "PYTHONPATH")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", WATCHED_MAIN, *words],
        cwd=tmp_path,
        env=clean,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    code, heavy = json.loads(done.stdout.splitlines()[-1])
    assert heavy == []
    assert code == (0 if words in QUICK[:3] else 2), done.stderr
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 1


def test_list_names_presets_and_data_sets(capsys):
    assert cli.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split(maxsplit=1) == ["int4_awq", "not built yet: AWQ is missing"] for line in lines)
    for name in (
        "fp8",
        "fp8_per_channel_per_token",
        "nvfp4",
        "w4a16_nvfp4",
        "int8_weight_only",
        "nvfp4_mlp_only",
        "fp8_cast",
        "none",
        "cnn_dailymail",
        "nemotron-post-training-dataset-v2",
        "c4",
        "wikitext",
        "pydoc",
    ):
        found = [line for line in lines if line.split()[:1] == [name]]
        assert found, name
        assert all(len(line.split()) > 2 for line in found), "a name and a line about it"


def test_list_names_the_formats_that_rules_may_give(capsys):
    """What a message about a rule sends its reader to: all of them, and what may have them."""
    assert cli.main(["--list"]) == 0
    text = capsys.readouterr().out
    part = text.split("Number formats (in the rules of a recipe)\n")[1].split("\n\n")[0]
    lines = dict(line.split(maxsplit=1) for line in part.splitlines())
    assert lines.keys() == FORMATS.keys()
    assert lines["fp8"] == "weights, inputs, keys and values: E4M3, one scale per tensor"
    assert lines["int8"] == "inputs: INT8, one scale per tensor"


def test_list_marks_what_is_taken_without_the_option(capsys):
    assert cli.main(["--list"]) == 0
    marked = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith("(default)")]
    assert marked == [RunConfig.qformat, DEFAULT_KV]


def test_help_has_its_panels(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for panel in ("Model", "Quantization", "Calibration data", "Export", "Run"):
        assert f" {panel} " in out


@pytest.mark.parametrize("start", [["-m", "hf_ptq"], [str(ROOT / "hf-ptq")]], ids=["module", "launcher"])
def test_both_starts_are_the_same_command(start, tmp_path):
    done = subprocess.run([sys.executable, *start, "--version"], cwd=tmp_path, check=True, capture_output=True)
    assert done.stdout.decode() == f"hf-ptq {hf_ptq.__version__}\n"
    failed = subprocess.run([sys.executable, *start, "--nosuch"], cwd=tmp_path, check=False, capture_output=True)
    assert failed.returncode == 2


def test_the_launcher_runs_the_checkout_it_lies_in():
    assert os.access(ROOT / "hf-ptq", os.X_OK)
    launcher = str(ROOT / "hf-ptq")
    code = f"import runpy, sys; runpy.run_path({launcher!r}); import hf_ptq; print(hf_ptq.__file__, sys.path[0])"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd="/", check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(ROOT / "hf_ptq" / "__init__.py"), str(ROOT)]


# ---- the package


def test_public_names_come_on_first_use():
    code = "import sys, hf_ptq; assert not any(m.startswith('hf_ptq.') for m in sys.modules); hf_ptq.RunConfig"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert hf_ptq.RunConfig is RunConfig
    assert {"RunConfig", "quantize", "__version__"} <= set(dir(hf_ptq))
    with pytest.raises(AttributeError, match="nosuch"):
        _ = hf_ptq.nosuch
