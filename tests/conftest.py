"""Fixtures shared by all tests: tiny checkpoints made once a session, the independent checker, the golden data."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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
def check_export(shared: Path) -> Callable[[Path, Path], None]:
    """Compare an export with its source by the independent checker; fails with its findings."""

    def check(source: Path, export: Path) -> None:
        command = [sys.executable, str(shared / "check" / "check_export.py"), str(source), str(export)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    return check
