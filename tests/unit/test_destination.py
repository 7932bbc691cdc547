"""Where an export may go, and that it gets there whole or not at all."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from hf_ptq.checkpoint.room import room_problems
from hf_ptq.errors import RunError, UserError
from hf_ptq.export import destination as module
from hf_ptq.export.destination import Destination, check_export_path, is_earlier_export, room_for_export
from hf_ptq.report import Report

HOST = socket.gethostname()
NEW = {
    "model-00001-of-00002.safetensors": "new 1", "model-00002-of-00002.safetensors": "new 2", "sub/code.py": "new code",
    "model.safetensors.index.json": "new index", "config.json": "new config", "hf_ptq_report.json": "{}",
}  # fmt: skip
OLD = {
    "model.safetensors": "old", "config.json": "old config", "hf_ptq_report.json": "{}", "tokenizer.json": "old tokens",
}  # fmt: skip


def fill(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


def contents(directory: Path) -> dict[str, str]:
    return {str(p.relative_to(directory)): p.read_text() for p in directory.rglob("*") if p.is_file()}


def quiet() -> Report:
    return Report(Console(quiet=True))


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def export(path: Path, overwrite: bool = False, files: dict[str, str] = NEW, report: Report | None = None) -> None:
    with Destination(path, overwrite, report or quiet()) as destination:
        fill(destination.directory, files)
        destination.commit(durable=True)


def fail(path: Path, error: BaseException, report: Report | None = None) -> None:
    with Destination(path, False, report or quiet()) as destination:
        fill(destination.directory, NEW)
        raise error


@pytest.fixture(params=["sibling", "inside"])
def place(request, tmp_path, monkeypatch) -> Path:
    """A final path that is made by a rename, or one that stays because it is a mount point."""
    final = tmp_path / "parent" / "out"
    if request.param == "inside":
        final.mkdir(parents=True)
        monkeypatch.setattr(module, "_is_mount_point", lambda path: path == final)
    else:
        final.parent.mkdir()
    return final


# --- the checks ------------------------------------------------------------------------------------


def refusal(path: Path, source: Path | None = None, overwrite: bool = False) -> str:
    problems = check_export_path(path, source, overwrite)
    assert len(problems) == 1
    return str(problems[0])


def test_paths_that_are_fine(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "empty").mkdir()
    for path in ("new", "deep/er/new", "empty", "source2", "sour"):
        assert check_export_path(tmp_path / path, tmp_path / "source", overwrite=False) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "source"]  # nothing is left of the probes
    assert check_export_path(tmp_path / "new", None, overwrite=True) == []


def test_the_source_and_what_lies_in_or_around_it(tmp_path):
    source = tmp_path / "a" / "source"
    source.mkdir(parents=True)
    (tmp_path / "link").symlink_to(source)
    assert "is the source itself" in refusal(source / ".." / "source", source)
    assert "is the source itself" in refusal(tmp_path / "link", source, overwrite=True)
    assert "is the source itself" in refusal(source, tmp_path / "link")
    assert f"lies inside the source {source}" in refusal(source / "x" / "out", source)
    assert f"lies inside the source {source}" in refusal(tmp_path / "link" / "out", source)
    assert f"contains the source {source}" in refusal(tmp_path, source, overwrite=True)
    (source / "model.gguf").touch()  # a source may be a single file
    assert "contains the source" in refusal(source, source / "model.gguf")


def test_a_path_that_exists(tmp_path):
    fill(tmp_path / "theirs", {"thesis.tex": "x"})
    fill(tmp_path / "ours", OLD)
    (tmp_path / "file").touch()
    assert "not empty and holds no earlier export" in refusal(tmp_path / "theirs")
    assert "not empty and holds no earlier export" in refusal(tmp_path / "theirs", overwrite=True)
    assert "holds an earlier export\n    -> add --overwrite" in refusal(tmp_path / "ours")
    assert check_export_path(tmp_path / "ours", None, overwrite=True) == []
    assert "is a file" in refusal(tmp_path / "file", overwrite=True)


@pytest.mark.parametrize(
    ("files", "is_ours"),
    [
        ({"hf_ptq_report.json": "{}"}, True),
        ({"config.json": '{"quantization_config": {"producer": {"name": "hf-ptq"}}}'}, True),
        ({"config.json": '{"quantization_config": {"quant_method": "fp8"}}', "model.safetensors": "theirs"}, False),
        ({"config.json": '{"quantization_config": {"producer": {"name": "modelopt"}}}'}, False),
        ({"config.json": '{"quantization_config": [1]}'}, False),
        ({"config.json": "[]", "hf_quant_config.json": "{}"}, False),
        ({"config.json": "{ broken"}, False),
        ({"model.safetensors": ""}, False),
    ],
)
def test_what_counts_as_an_earlier_export(tmp_path, files, is_ours):
    fill(tmp_path / "out", files)
    assert is_earlier_export(tmp_path / "out") is is_ours


def test_overwrite_spares_files_that_the_earlier_report_does_not_list(tmp_path):
    listed = json.dumps({"files": [*OLD, "sub/code.py"]})
    fill(tmp_path / "out", OLD | {"hf_ptq_report.json": listed, "sub/code.py": "x"})
    assert check_export_path(tmp_path / "out", None, overwrite=True) == []
    fill(tmp_path / "out", {"evaluation/results.json": "precious"})
    assert "would delete files" in refusal(tmp_path / "out", overwrite=True)
    assert "evaluation/results.json" in refusal(tmp_path / "out", overwrite=True)
    with pytest.raises(UserError, match="evaluation/results"):
        export(tmp_path / "out", overwrite=True)


def test_places_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert f"{tmp_path / 'file'} is no directory" in refusal(tmp_path / "file" / "a" / "out")
    assert "cannot be written: No such file or directory (/proc)" in refusal(Path("/proc/out"))

    def refuse(prefix, dir):
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr(module.tempfile, "mkdtemp", refuse)
    assert f"cannot be written: Permission denied ({tmp_path})" in refusal(tmp_path / "a" / "out")


def test_a_parent_that_cannot_be_written_is_no_matter_if_the_path_can(tmp_path, monkeypatch):
    final = tmp_path / "out"
    fill(final, OLD)
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path and real(path, mode))
    assert check_export_path(final, None, overwrite=True) == []
    with Destination(final, True, quiet()) as destination:
        assert destination.directory.parent == final


def test_room(tmp_path):
    room = os.statvfs(tmp_path)
    free = room.f_bavail * room.f_frsize
    assert room_problems([room_for_export(tmp_path / "a" / "b", free // 2)]) == []
    (problem,) = room_problems([room_for_export(tmp_path / "a" / "b", 10**17 + 1)])
    assert "needs 100 PB (100,000,000,000,000,001 bytes)" in problem.what
    assert f"the file system of {tmp_path} has " in problem.what
    reported = int(problem.what.split("(")[2].split(" bytes")[0].replace(",", ""))
    assert abs(reported - free) < 2**30


# --- the way there ---------------------------------------------------------------------------------


def test_a_new_export(place):
    with Destination(place, False, quiet()) as destination:
        assert destination.directory.name == f".out.hf-ptq-{HOST}-{os.getpid()}.tmp"
        assert not [p for p in place.rglob("*") if destination.directory not in (p, *p.parents)]
        fill(destination.directory, NEW)
        destination.commit()
    assert contents(place) == NEW
    assert sorted(p.name for p in place.parent.iterdir()) == ["out"]
    assert not list(place.glob(".*"))


def test_an_empty_directory_that_was_prepared_is_filled(tmp_path):
    place = tmp_path / "out"
    place.mkdir(mode=0o750)
    before = place.stat().st_ino
    with Destination(place, False, quiet()) as destination:
        assert destination.directory.parent == place
        fill(destination.directory, NEW)
        destination.commit()
        assert not destination.directory.exists()
    assert contents(place) == NEW
    assert (place.stat().st_ino, place.stat().st_mode & 0o777) == (before, 0o750)


def test_parents_are_made_and_on_failure_removed(tmp_path):
    export(tmp_path / "a" / "b" / "out")
    assert contents(tmp_path / "a" / "b" / "out") == NEW
    with pytest.raises(KeyboardInterrupt):
        fail(tmp_path / "c" / "d" / "out", KeyboardInterrupt())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RunError, SystemExit, None])
def test_without_commit_nothing_is_left(place, error):
    before = sorted(place.parent.rglob("*"))
    try:
        with Destination(place, False, quiet()) as destination:
            fill(destination.directory, NEW)
            if error:
                raise error("stop")
    except (KeyboardInterrupt, RunError, SystemExit):
        pass
    assert sorted(place.parent.rglob("*")) == before


def test_an_earlier_export_is_replaced_wholly(place):
    fill(place, OLD)
    export(place, overwrite=True)
    assert contents(place) == NEW
    assert sorted(p.name for p in place.parent.iterdir()) == ["out"]


def test_without_overwrite_an_earlier_export_stays(place):
    fill(place, OLD)
    with pytest.raises(UserError, match="add --overwrite"):
        export(place)
    assert contents(place) == OLD


def test_an_earlier_export_stays_while_the_new_one_is_made(place):
    fill(place, OLD)
    with Destination(place, True, quiet()) as destination:
        fill(destination.directory, NEW)
        assert {k: v for k, v in contents(place).items() if not k.startswith(".")} == OLD
    assert contents(place) == OLD


def renames_until(monkeypatch, allowed: int, error: BaseException) -> list[tuple[str, str]]:
    """Let `allowed` renames pass, raise on the next, let all others pass (those that undo)."""
    real, seen = Path.rename, []

    def rename(path, target):
        seen.append((path.name, Path(target).name))
        if len(seen) == allowed + 1:
            raise error
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    return seen


@pytest.mark.parametrize("error", [OSError(16, "Device or resource busy"), KeyboardInterrupt()])
@pytest.mark.parametrize("allowed", range(11))
def test_a_commit_that_fails_at_any_step_restores_the_earlier_export(place, monkeypatch, allowed, error):
    fill(place, OLD)
    seen = renames_until(monkeypatch, allowed, error)
    failed = False
    try:
        export(place, overwrite=True)
    except (RunError, KeyboardInterrupt):
        failed = True
    assert failed is (len(seen) > allowed)
    assert contents(place) == (OLD if failed else NEW)
    assert sorted(p.name for p in place.parent.iterdir()) == ["out"]
    assert not list(place.glob(".*"))


def test_interrupted_just_after_the_last_rename(tmp_path, monkeypatch):
    """Ctrl-C between a rename and the note that it is done."""
    place = tmp_path / "out"
    fill(place, OLD)
    real = Path.rename

    def rename(path, target):
        real(path, target)
        if path.name.endswith(".tmp"):
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        export(place, overwrite=True)
    assert contents(place) == OLD
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_inside_a_checkpoint_appears_with_its_config_last_and_goes_with_it_first(tmp_path, monkeypatch):
    place = tmp_path / "out"
    fill(place, OLD)
    monkeypatch.setattr(module, "_is_mount_point", lambda path: path == place)
    seen = renames_until(monkeypatch, 10**6, OSError())
    export(place, overwrite=True)
    names = [name for name, _ in seen]
    assert names[0] == "config.json"
    assert names[-2:] == ["model.safetensors.index.json", "config.json"]
    assert sorted(names[: len(OLD)]) == sorted(OLD)


def test_a_path_that_is_filled_by_another_during_the_run(tmp_path):
    place = tmp_path / "out"
    for overwrite in (False, True):
        with Destination(place, overwrite, quiet()) as destination:
            fill(destination.directory, NEW)
            fill(place, {"thesis.tex": "x"})
            with pytest.raises(RunError, match="not empty and holds no earlier export"):
                destination.commit()
        assert contents(tmp_path) == {"out/thesis.tex": "x"}
        (place / "thesis.tex").unlink()
        place.rmdir()


def test_a_link_as_export_path_is_followed(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "scratch" / "out")
    export(tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert contents(tmp_path / "scratch" / "out") == NEW
    export(tmp_path / "out", overwrite=True, files=NEW | {"more": "x"})
    assert contents(tmp_path / "scratch" / "out") == NEW | {"more": "x"}
    assert sorted(p.name for p in (tmp_path / "scratch").iterdir()) == ["out"]


def test_long_names(tmp_path):
    export(tmp_path / ("ü" * 120))
    assert contents(tmp_path / ("ü" * 120)) == NEW


# --- what dead runs leave ---------------------------------------------------------------------------


def leave(place: Path, pid: int, host: str = HOST, kind: str = "tmp", name: str = "out") -> Path:
    inside = place.is_dir()
    left = (place if inside else place.parent) / f".{name}.hf-ptq-{host}-{pid}.{kind}"
    fill(left, OLD)
    return left


def test_what_a_dead_run_left_is_removed(place):
    dead, own = leave(place, dead_pid()), leave(place, os.getpid())
    assert check_export_path(place, None, overwrite=False) == []
    with Destination(place, False, quiet()) as destination:
        assert not dead.exists()
        assert own == destination.directory
        assert not list(destination.directory.iterdir())
        fill(destination.directory, NEW)
        destination.commit()
    assert contents(place) == NEW


def test_a_live_run_is_not_disturbed(place):
    live = leave(place, os.getppid())
    message = f"process {os.getppid()} is writing an export to {place}"
    assert message in refusal(place)
    with pytest.raises(UserError, match=message):
        export(place)
    assert contents(live) == OLD


def test_what_is_not_known_to_be_dead_stays(place):
    other_host, other_path = leave(place, dead_pid(), host="node-12-3"), leave(place, dead_pid(), name="other")
    report = quiet()
    export(place, report=report)
    assert contents(other_host) == contents(other_path) == OLD
    (warning,) = report.warnings
    assert str(other_host) in warning
    assert "node-12-3" in warning


def test_an_earlier_export_set_aside_by_a_killed_run(tmp_path):
    place = tmp_path / "out"
    old = leave(place, dead_pid(), kind="old")
    report = quiet()
    with pytest.raises(RunError):
        fail(place, RunError("this run fails too"), report)
    assert contents(old) == OLD  # it may be the only one there is
    assert str(old) in report.warnings[0]
    export(place)
    export(place, overwrite=True)  # now a whole one is there, and the old one is only in the way
    assert not old.exists()
    assert contents(place) == NEW


def test_mount_points():
    assert module._is_mount_point(Path("/proc"))
    assert not module._is_mount_point(Path("/proc/self"))
