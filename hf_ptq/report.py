"""What the user sees, and what the export says about itself: one object, handed to every stage.

A stage tells (`say`, `warn`, `progress`, `table`), records (`record`, JSON-able values by section) and is timed
(`stage`). `write` puts everything into hf_ptq_report.json, `print_summary` shows it once more at the end. Sections:

    versions, options            what ran, and what was asked for
    source, plan, quantized      where the model came from, how it was laid out, what was quantized with what
    data, previews               what calibrated it; texts before and after
    bytes, signal_to_noise       in and out; per kind of layer, the worst named
    ranks                        of several: what each read and wrote, and its peak memory
    exported, stages, warnings   the path; seconds and peak memory of each stage; all warnings

The summary shows a section by its shape alone (mapping, mapping of mappings, list of mappings), so that a stage may
add what it likes. On a terminal a progress bar moves; elsewhere (a log file, Slurm) each stage leaves a line with its
rate, long ones a line a minute.

What this file does not know: torch, and what the numbers mean.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from hf_ptq.memory import MemoryMonitor
from hf_ptq.sizes import human_bytes

REPORT_FILE = "hf_ptq_report.json"
PACKAGES = ("hf-ptq", "torch", "transformers", "safetensors", "tokenizers", "datasets", "nvidia-ml-py")
SUMMARY_ORDER = ("source", "plan", "data", "kv_cache", "signal_to_noise", "bytes", "previews", "ranks")
SUMMARY_ROWS = 12
LOG_WIDTH = 120
LOG_SECONDS = 60.0


class Report:
    """Collects and shows what a run has to say.

    `console`: standard output by default; `Console(quiet=True)` for a rank that stays silent. Not `verbose`: only
    warnings and the summary are shown; everything is collected all the same.
    """

    def __init__(self, console: Console | None = None, verbose: bool = True) -> None:
        self.console = console or _stdout_console()
        self.verbose = verbose
        self.sections: dict[str, Any] = {}
        self.warnings: list[str] = []
        self.stages: list[dict[str, Any]] = []
        self._monitor: MemoryMonitor | None = None
        self._bar_is_shown = False

    def warn(self, text: str) -> None:
        """A warning: shown at once, in the summary, and in the JSON. The same text counts once."""
        if text not in self.warnings:
            self.warnings.append(text)
            self._line(f"warning: {text}", "yellow")

    def say(self, text: str) -> None:
        """A line for the user, when verbose."""
        if self.verbose:
            self._line(text)

    def record(self, section: str, value: Any) -> None:
        """Keep `value` as a section of the JSON.

        Dataclasses, mappings with string keys, sequences, sets, paths and plain values are taken; anything else is
        our own bug and raises `TypeError` here, where the section is known.
        """
        self.sections[section] = plain(value, section)

    def attach_monitor(self, monitor: MemoryMonitor) -> None:
        """Take the stages' peak memory from this (started) monitor, and say what it cannot watch."""
        self._monitor = monitor
        for note in monitor.notes:
            self.say(note)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage and take its peak memory, also when it raises."""
        self.say(f"== {name}")
        entry: dict[str, Any] = {"name": name, "seconds": 0.0}
        self.stages.append(entry)  # before the work, so that nested stages come out in the order they began
        window = self._monitor.mark() if self._monitor else None
        start = time.perf_counter()
        finished = False
        try:
            yield
            finished = True
        finally:
            entry["seconds"] = round(time.perf_counter() - start, 3)
            if self._monitor and window:
                peaks = self._monitor.peaks(window)
                entry["host_peak_bytes"] = peaks.host_held
                entry["host_file_peak_bytes"] = peaks.host_file
                entry["gpu_peak_bytes"] = peaks.gpu_used
            if not finished:
                entry["failed"] = True
            self.say(f"   {name}{'' if finished else ' failed'}: {_stage_text(entry)}")

    @contextmanager
    def progress(self, label: str, total: int, unit: str) -> Iterator[Callable[..., None]]:
        """Progress over `total` units; yields `advance(n=1)`, which any thread may call. `unit` "bytes" reads as sizes.

        When it ends, a line says how many there were and how fast. Silent when not verbose.
        """
        counter = _Counter(label, total, unit)
        if not self.verbose:
            yield counter.advance
            return
        if self.console.is_terminal and not self._bar_is_shown:
            self._bar_is_shown = True  # one moving bar at a time; a progress inside it leaves its line only
            with _bar(self.console) as bar:
                task = bar.add_task(label, total=total or None, state="")
                counter.on_change = lambda: bar.update(task, completed=counter.done, state=counter.state())
                try:
                    yield counter.advance
                finally:
                    self._bar_is_shown = False
        else:
            counter.on_change = lambda: counter.each_minute(self.say)
            yield counter.advance
        self.say(f"   {label}: {counter.outcome()}")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show a table, when verbose. It is not recorded: `record` what should be in the JSON."""
        if self.verbose:
            self._table(title, columns, rows)

    def as_dict(self) -> dict[str, Any]:
        """Everything that hf_ptq_report.json holds."""
        notes = list(self._monitor.notes) if self._monitor else []
        return {
            "versions": versions(),
            **self.sections,
            "warnings": list(self.warnings),
            "stages": [dict(stage) for stage in self.stages],
            "memory_not_watched": notes,
        }

    def write(self, path: Path) -> None:
        """Write the JSON to this file (by convention `REPORT_FILE` in the export)."""
        path.write_text(json.dumps(self.as_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")

    def print_summary(self) -> None:
        """Show the sections, the stages and once more all warnings. Not silenced by verbose=False."""
        for section in SUMMARY_ORDER:
            if section in self.sections:
                self._show(section, self.sections[section])
        if self.stages:
            rows = [[s["name"], *_stage_cells(s)] for s in self.stages]
            title = "stages of rank 0" if "ranks" in self.sections else "stages"
            self._table(title, ["stage", "seconds", "host peak", "GPU peak"], rows)
        for text in self.warnings:
            self._line(f"warning: {text}", "yellow")
        if "exported" in self.sections:
            self._line(f"exported: {_cell('exported', self.sections['exported'])}", "green")

    def _show(self, section: str, value: Any) -> None:
        """A section as a table, by its shape."""
        title = section.replace("_", " ")
        columns, rows = _tabulate(section, value)
        self._table(title, columns, rows[:SUMMARY_ROWS])
        if len(rows) > SUMMARY_ROWS:
            self._line(f"   ... {len(rows) - SUMMARY_ROWS} more in {REPORT_FILE}")

    def _line(self, text: str, style: str = "") -> None:
        # Names of modules and patterns hold brackets: never read text as markup, never break a path.
        self.console.print(Text(text, style=style), soft_wrap=True)

    def _table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        style = {"title_justify": "left", "box": box.SIMPLE, "show_edge": False, "show_header": any(columns)}
        table = Table(title=Text(f"\n{title}", style="bold"), **style)
        for column in columns:
            table.add_column(Text(column), overflow="fold")
        for row in rows:
            table.add_row(*(Text(str(cell)) for cell in row))
        self.console.print(table)


def versions() -> dict[str, str]:
    """Python, platform and the installed versions of `PACKAGES`, read from their metadata."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def plain(value: Any, where: str) -> Any:
    """`value` as JSON knows it. Numbers that JSON lacks become "inf", "-inf", "nan". Raises `TypeError`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {_key(key, where): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(plain(item, where) for item in value)
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise TypeError(f"{where}: {type(value).__name__} cannot be written to the report")


class _Counter:
    """What a progress has counted so far, safe to advance from several threads."""

    def __init__(self, label: str, total: int, unit: str) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = 0
        self.on_change: Callable[[], None] = lambda: None
        self._start = self._said = time.perf_counter()
        self._lock = threading.Lock()

    def advance(self, n: int = 1) -> None:
        with self._lock:
            self.done += n
            self.on_change()

    def each_minute(self, say: Callable[[str], None]) -> None:
        now = time.perf_counter()
        if now - self._said >= LOG_SECONDS:
            self._said = now
            say(f"   {self.label}: {self.state()}")

    def state(self) -> str:
        if not self.total:
            return f"{self._amount(self.done)}, {self._rate()}"
        done = human_bytes(self.done) if self.unit == "bytes" else f"{self.done:,}"
        return f"{done} of {self._amount(self.total)}, {self._rate()}"

    def outcome(self) -> str:
        seconds = time.perf_counter() - self._start
        return f"{self._amount(self.done)} in {seconds:.1f} s ({self._rate()})"

    def _amount(self, count: float) -> str:
        return human_bytes(count) if self.unit == "bytes" else f"{count:,} {self.unit}"

    def _rate(self) -> str:
        rate = self.done / max(time.perf_counter() - self._start, 1e-6)
        if self.unit == "bytes":
            return f"{human_bytes(rate)}/s"
        return f"{rate:,.0f} {self.unit}/s" if rate >= 1000 else f"{rate:.4g} {self.unit}/s"


def _stdout_console() -> Console:
    console = Console()
    # Without a terminal rich assumes 80 columns, which folds module names.
    return console if console.is_terminal else Console(width=LOG_WIDTH)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("   {task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[state]}", markup=False),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def _stage_cells(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    """Seconds, host peak and the fullest GPU's peak of a stage, as text."""
    host = entry.get("host_peak_bytes")
    gpu = entry.get("gpu_peak_bytes") or {}
    return (
        f"{entry['seconds']:.1f}" + (" (failed)" if entry.get("failed") else ""),
        "-" if host is None else human_bytes(host),
        human_bytes(max(gpu.values())) if gpu else "-",
    )


def _stage_text(entry: Mapping[str, Any]) -> str:
    host, gpu = _stage_cells(entry)[1:]
    parts = [f"{entry['seconds']:.1f} s"]
    parts += [f"{where} peak {size}" for where, size in (("host", host), ("GPU", gpu)) if size != "-"]
    return ", ".join(parts)


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{where}: key {key!r} is no string")
    return key


def _tabulate(section: str, value: Any) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a recorded section, by its shape."""
    if isinstance(value, dict) and section != "previews":
        if value and all(isinstance(item, dict) for item in value.values()):
            value = [{"": name, **item} for name, item in value.items()]
        else:
            return ["", ""], [[key.replace("_", " "), _cell(f"{section} {key}", item)] for key, item in value.items()]
    records = value if isinstance(value, list) else [value]
    if not all(isinstance(record, dict) for record in records):
        return [""], [[_cell(section, record)] for record in records]
    columns = list(dict.fromkeys(key for record in records for key in record))
    rows = [[_cell(f"{section} {key}", record.get(key)) for key in columns] for record in records]
    return [column.replace("_", " ") for column in columns], rows


def _cell(name: str, value: Any) -> str:
    """A value for people: sizes where the name speaks of bytes, floats with four digits, missing ones as a dash."""
    if value is None:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool) and "bytes" in name:
        return human_bytes(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_cell(f'{name} {key}', item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(_cell(name, item) for item in value)
    return str(value)
