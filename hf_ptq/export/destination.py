"""Where the export goes, and how it gets there whole or not at all.

Everything is written into a temporary directory, and `commit` gives it its name by one rename. The temporary is a
sibling of the final path, on the same file system. Where no rename can do (the path is a mount point, an empty
directory that somebody has prepared, or its parent cannot be written) it lies inside the path, and `commit` moves its
entries up one by one, index and config.json last: without them nothing takes the directory for a checkpoint.

An earlier export is replaced in the order: old aside, new in, old deleted. Each step of a commit leaves behind how to
undo it, and an error or Ctrl-C on the way undoes them all, last first.

Names tell whose they are: `.NAME.hf-ptq-HOST-PID.tmp` (a run's temporary) and `.old` (an earlier export, set aside).
The next run for the same path removes what a process left that is gone from this host; of other hosts it knows
nothing. `--overwrite` replaces only what hf-ptq wrote, and refuses where files lie in it that hf-ptq did not write.

This file does not know what a checkpoint consists of, the names of index and configuration apart.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Literal

from hf_ptq.checkpoint.room import Need
from hf_ptq.checkpoint.shards import INDEX_NAME
from hf_ptq.errors import Problem, RunError, UserError
from hf_ptq.report import REPORT_FILE, Report

CONFIG_NAME = "config.json"
OURS = re.compile(r"\.(?P<name>.*)\.hf-ptq-(?P<host>.+)-(?P<pid>\d{1,9})\.(?P<kind>tmp|old)", re.DOTALL)
NOBODYS = frozenset({"lost+found"})  # what a fresh file system has in its root
MAX_NAMED = 5
NO_PROCESS = 999_999_999  # above what Linux gives out


# --- checks before the run -------------------------------------------------------------------------


def check_export_path(path: Path, source_dir: Path | None, overwrite: bool) -> list[Problem]:
    """Why the export cannot be written to `path`; empty if it can. Symbolic links are followed in both paths.

    `source_dir`: the source's directory (or file), None while it is not known. Makes and removes one empty directory
    where the export would be made, to see whether that works.
    """
    final = path.expanduser().resolve()
    related = _relation(final, source_dir.expanduser().resolve()) if source_dir else None
    if related:
        return [Problem(f"--export_path {path} {related}", "take a directory apart from the source")]
    taken = _taken(final, overwrite)
    if taken:
        return [taken]
    home = home_of(final)
    reason = f"{home} is no directory" if not home.is_dir() else _cannot_write(home)
    return [Problem(f"--export_path {path} cannot be written: {reason}", "take another path")] if reason else []


def home_of(final: Path) -> Path:
    """The existing directory in which the export's temporary, or what leads to it, would be made."""
    return nearest_directory(final if _goes_inside(final) else final.parent)


def room_for_export(path: Path, num_bytes: int) -> Need:
    """What the export will need on the file system of `path`.

    An earlier export at `path` does not count as free: it stays until the new one is complete.
    """
    home = nearest_directory(path.expanduser().resolve())
    return Need("the export", home, num_bytes, "take another --export_path")


def is_earlier_export(directory: Path) -> bool:
    """Whether hf-ptq wrote this directory: its report is there, or config.json names it as producer.

    A `quantization_config` alone proves nothing: many a source has one.
    """
    block = _read_object(directory / CONFIG_NAME).get("quantization_config")
    producer = block.get("producer") if isinstance(block, dict) else None
    named = isinstance(producer, dict) and producer.get("name") == "hf-ptq"
    return named or (directory / REPORT_FILE).is_file()


def _relation(final: Path, source: Path) -> str | None:
    if final == source:
        return "is the source itself"
    if source in final.parents:
        return f"lies inside the source {source}"
    return f"contains the source {source}" if final in source.parents else None


def _taken(final: Path, overwrite: bool) -> Problem | None:
    """Why what is at `final` now is in the way, or who else is about to write there."""
    for directory in (final.parent, final):
        for found in _temporaries(directory, final):
            if found["kind"] == "tmp" and _owner(found) == "alive":
                cure = f"wait for it, or remove {directory / found.string} if that process is another program"
                return Problem(f"process {found['pid']} is writing an export to {final}", cure)
    if not _exists(final):
        return None
    if not final.is_dir():
        return Problem(f"--export_path {final} is a file", "take another path")
    return _not_replaceable(final, overwrite) if _entries(final) else None


def _not_replaceable(final: Path, overwrite: bool) -> Problem | None:
    """Why a directory that is not empty must stay as it is."""
    if not is_earlier_export(final):
        cure = "take another path; --overwrite replaces nothing but an earlier export of hf-ptq"
        return Problem(f"--export_path {final} is not empty and holds no earlier export of hf-ptq", cure)
    if not overwrite:
        return Problem(f"--export_path {final} holds an earlier export", "add --overwrite to replace it")
    foreign = _foreign_files(final)
    if not foreign:
        return None
    named = ", ".join(foreign[:MAX_NAMED]) + (f" and {len(foreign) - MAX_NAMED} more" if foreign[MAX_NAMED:] else "")
    return Problem(f"--overwrite would delete files in {final} that are no part of the export: {named}", "move them")


def _foreign_files(directory: Path) -> list[str]:
    """Files that the export's report does not list; none where the report has no list."""
    listed = _read_object(directory / REPORT_FILE).get("files")
    if not isinstance(listed, list):
        return []
    there = (str(p.relative_to(directory)) for p in directory.rglob("*") if not p.is_dir() or p.is_symlink())
    return sorted(name for name in there if name not in listed and not OURS.fullmatch(name.split("/")[0]))


def _read_object(path: Path) -> dict:
    """A JSON object; {} if the file is missing or is something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def nearest_directory(path: Path) -> Path:
    """`path`, or its nearest ancestor that exists."""
    return next(p for p in (path, *path.parents) if _exists(p))


def _exists(path: Path) -> bool:
    """Whether there is something; what may not even be looked at counts as nothing, its parent will refuse to write."""
    try:
        return path.exists()
    except PermissionError:
        return False


def _cannot_write(directory: Path) -> str | None:
    """Why nothing can be made in `directory`: found by trying, permissions alone do not tell on network disks."""
    try:
        Path(tempfile.mkdtemp(prefix=".hf-ptq-probe-", dir=directory)).rmdir()
    except OSError as error:
        return f"{error.strerror} ({directory})"
    return None


def _goes_inside(final: Path) -> bool:
    """Whether `final` stays and is filled, rather than being made by a rename."""
    return final.is_dir() and (
        _is_mount_point(final) or not _entries(final) or not os.access(final.parent, os.W_OK | os.X_OK)
    )


def _is_mount_point(path: Path) -> bool:
    """Bind mounts within one file system included, which have the device number of their surroundings."""
    if path.is_mount():
        return True
    table = Path("/proc/self/mountinfo")
    points = (line.split(" ")[4] for line in table.read_text().splitlines()) if table.exists() else ()
    return str(path).replace("\\", "\\134").replace(" ", "\\040") in points


def _entries(directory: Path) -> list[Path]:
    """What lies in a directory, temporaries of any run apart."""
    return sorted(p for p in directory.iterdir() if p.name not in NOBODYS and not OURS.fullmatch(p.name))


# --- the temporary directory -----------------------------------------------------------------------


class Destination:
    """The way of an export to its path: write into `directory`, then `commit`.

    A context manager: leaving the block without `commit` removes everything that was made, parents of the path too.
    Raises RunError where the disk refuses, UserError where the path is taken by now.
    """

    def __init__(self, path: Path, overwrite: bool, report: Report) -> None:
        self.path = path.expanduser().resolve()
        self._overwrite = overwrite
        self._report = report
        self._inside = _goes_inside(self.path)
        self.directory = self._home / _own_name(self.path, "tmp")
        self._made: list[Path] = []

    @property
    def _home(self) -> Path:
        """The directory that the temporaries lie in."""
        return self.path if self._inside else self.path.parent

    def __enter__(self) -> Destination:
        taken = _taken(self.path, self._overwrite)
        if taken:
            raise UserError(taken)
        try:
            for directory in reversed([p for p in (self._home, *self._home.parents) if not p.exists()]):
                directory.mkdir()
                self._made.append(directory)
            self._sweep()
            self.directory.mkdir()
        except OSError as error:
            self._remove_parents()
            what = f"{self.directory} cannot be made: {error.strerror}"
            raise RunError(Problem(what, "take another --export_path")) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.directory.exists():
            self._remove(self.directory)
            self._remove_parents()

    def abandon(self) -> None:
        """Remove what was made while another thread may be at work in it, or about to give it its name.

        The temporary is renamed first, so that a rename in that thread finds it whole or not at all; by a process
        number that no process has, so that the next run removes what this one does not get done.
        """
        doomed = self._home / _own_name(self.path, "tmp", NO_PROCESS)
        with contextlib.suppress(OSError):  # it has its name, or nothing was made
            self.directory.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
        self._remove_parents()

    def commit(self, durable: bool = False) -> None:
        """Give the finished directory its final name; `durable` waits until names and small files are on the disk."""
        try:
            if durable:
                _flush_tree(self.directory)
            old = self._move_up() if self._inside else self._rename()
            if durable:
                _flush(self.path)
                _flush(self.path.parent)
        except OSError as error:
            raise RunError(f"{self.path}: the export cannot get its name: {error}") from error
        if old:
            self._remove(old)

    def _rename(self) -> Path | None:
        """One rename; returns the earlier export that was set aside for it."""
        with contextlib.ExitStack() as undo:
            old = self._aside() if self.path.exists() and _entries(self.path) else None
            if old:
                undo.callback(_move_back, old, self.path)
                self.path.rename(old)
            undo.callback(_move_back, self.path, self.directory)
            self.directory.rename(self.path)
            undo.pop_all()
        return old

    def _move_up(self) -> Path | None:
        """Entry by entry from the temporary inside the path; returns where the earlier export was set aside."""
        with contextlib.ExitStack() as undo:
            present = _entries(self.path)
            old = self._aside() if present else None
            if old:
                undo.callback(_remove_if_empty, old)
                old.mkdir()
                for entry in reversed(_config_last(present)):
                    undo.callback(_move_back, old / entry.name, entry)
                    entry.rename(old / entry.name)
            for entry in _config_last(list(self.directory.iterdir())):
                undo.callback(_move_back, self.path / entry.name, entry)
                entry.rename(self.path / entry.name)
            undo.pop_all()
        self.directory.rmdir()
        return old

    def _aside(self) -> Path:
        """The name for the earlier export while it is replaced; RunError if what is there now must not be."""
        taken = _not_replaceable(self.path, self._overwrite)
        if taken:
            raise RunError(taken)
        return self._home / _own_name(self.path, "old")

    def _sweep(self) -> None:
        """Remove what dead runs for this path left behind; name what may be another host's."""
        for directory in (self.path.parent, self.path):
            for found in _temporaries(directory, self.path):
                left, owner = directory / found.string, f"process {found['pid']} on {found['host']}"
                if _owner(found) == "unknown":
                    self._report.warn(f"{left} is of {owner}; remove it if that run is over")
                elif found["kind"] == "old" and not (self.path / CONFIG_NAME).exists():
                    self._report.warn(f"{owner} was killed; it left the earlier export of {self.path} in {left}")
                elif _owner(found) == "gone":
                    self._report.say(f"removing {left}, left behind by {owner}")
                    self._remove(left)

    def _remove(self, directory: Path) -> None:
        """Delete a directory of ours; what cannot be deleted is a warning, the export is not in danger."""
        for _ in range(3):  # other ranks may be writing their last file
            shutil.rmtree(directory, ignore_errors=True)
            if not directory.exists():
                return
            time.sleep(0.2)
        self._report.warn(f"{directory} could not be removed wholly; remove it by hand")

    def _remove_parents(self) -> None:
        """Remove the directories that were made for the temporary, if they are empty."""
        with contextlib.suppress(OSError):
            for directory in reversed(self._made):
                directory.rmdir()


def _temporaries(directory: Path, final: Path) -> list[re.Match[str]]:
    """The entries of `directory` that runs for `final` have made there."""
    try:
        names = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else ()
    except PermissionError:  # such as /home, which users may pass through but not list
        return []
    matches = [match for name in names if (match := OURS.fullmatch(name))]
    return [match for match in matches if match["name"] == _short(final.name)]


def _owner(found: re.Match[str]) -> Literal["alive", "gone", "unknown"]:
    """What has become of the process that made a temporary; unknown on another host."""
    if found["host"] != socket.gethostname():
        return "unknown"
    pid = int(found["pid"])
    if pid == os.getpid():
        return "gone"  # we have made none yet: an earlier process had our number, as happens in containers
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        return "alive"
    return "alive"


def _own_name(final: Path, kind: str, process: int | None = None) -> str:
    return f".{_short(final.name)}.hf-ptq-{socket.gethostname()}-{process or os.getpid()}.{kind}"


def _short(name: str) -> str:
    """Cut so that the longest host name fits into a file name of 255 bytes beside it."""
    return name.encode()[:160].decode(errors="ignore")


def _config_last(entries: list[Path]) -> list[Path]:
    """In the order that a checkpoint may appear in: what makes it one comes last."""
    last = {INDEX_NAME: 1, CONFIG_NAME: 2}
    return sorted(entries, key=lambda entry: (last.get(entry.name, 0), entry.name))


def _move_back(now: Path, before: Path) -> None:
    """Undo a rename, which may not have happened when it was interrupted."""
    if os.path.lexists(now) and not os.path.lexists(before):
        now.rename(before)


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def _flush_tree(directory: Path) -> None:
    """Wait until all files and names below `directory` are on the disk."""
    for folder, _, files in os.walk(directory, topdown=False):
        for file in files:
            _flush(Path(folder, file))
        _flush(Path(folder))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
