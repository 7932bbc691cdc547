"""What the report shows, records and writes."""

from __future__ import annotations

import io
import json
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

import hf_ptq.report as report_module
from hf_ptq.memory import MemoryMonitor
from hf_ptq.report import REPORT_FILE, Report, plain


def make(verbose=True, terminal=False, width=120):
    """A report and a function that gives what it has shown."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=terminal, color_system=None, legacy_windows=False)
    return Report(console, verbose), stream.getvalue


def test_a_warning_is_shown_kept_and_repeated():
    report, shown = make()
    report.warn("pattern *[nosuch]* matched nothing")
    report.warn("pattern *[nosuch]* matched nothing")
    assert shown().count("warning: pattern *[nosuch]* matched nothing") == 1
    report.print_summary()
    assert shown().count("warning: pattern *[nosuch]* matched nothing") == 2
    assert report.as_dict()["warnings"] == ["pattern *[nosuch]* matched nothing"]


def test_not_verbose_shows_warnings_and_the_summary_only(tmp_path):
    report, shown = make(verbose=False)
    report.say("a line")
    report.table("a table", ["a"], [["b"]])
    with report.stage("load"), report.progress("load", 2, "rows") as advance:
        advance()
    assert shown() == ""
    report.warn("look here")
    report.record("exported", tmp_path)
    report.print_summary()
    assert "look here" in shown()
    assert f"exported: {tmp_path}" in shown()
    assert "load" in shown()


def test_text_is_never_markup_and_a_path_never_broken():
    report, shown = make(width=40)
    path = "/x/[bold]" + "y" * 60
    report.say(path)
    report.warn(path)
    report.table("[red]", ["[c]"], [["[/d]"]])
    assert path in shown().splitlines()
    for text in ("[red]", "[c]", "[/d]"):
        assert text in shown()


@dataclass(frozen=True)
class Fact:
    path: Path
    names: frozenset[str]
    shape: tuple[int, ...]


def test_recorded_values_become_json():
    value = {"fact": Fact(Path("/a"), frozenset(("y", "x")), (1, 2)), "snr": float("inf"), "none": None, "on": True}
    assert plain(value, "s") == {
        "fact": {"path": "/a", "names": ["x", "y"], "shape": [1, 2]},
        "snr": "inf",
        "none": None,
        "on": True,
    }


@pytest.mark.parametrize(
    ("value", "where"), [({"a": [object()]}, r"s\.a\[0\]: object"), ({1: 2}, "s: key 1 is no string")]
)
def test_what_is_no_json_is_refused_where_it_is_recorded(value, where):
    with pytest.raises(TypeError, match=where):
        make()[0].record("s", value)


def test_the_file_holds_every_section(tmp_path):
    report, _ = make()
    report.record("source", {"origin": "demo", "commit": None})
    report.record("signal_to_noise", {"mlp": {"mean_db": float("inf")}})
    with report.stage("load"):
        pass
    report.warn("w")
    path = tmp_path / REPORT_FILE
    report.write(path)
    data = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert data["source"] == {"origin": "demo", "commit": None}
    assert data["signal_to_noise"]["mlp"]["mean_db"] == "inf"
    assert data["warnings"] == ["w"]
    assert [stage["name"] for stage in data["stages"]] == ["load"]
    assert {"hf-ptq", "torch", "transformers", "python", "platform"} <= data["versions"].keys()


class FakeMonitor(MemoryMonitor):
    """Real windows over memory that the test sets."""

    def set(self, path, anonymous_mib):
        path.write_text(f"RssAnon: {anonymous_mib * 1024} kB\nRssFile: 0 kB\nRssShmem: 0 kB\n")


def test_a_stage_has_seconds_and_peaks(tmp_path):
    status = tmp_path / "status"
    monitor = FakeMonitor(status_file=status, sample_seconds=60)
    monitor.set(status, 100)
    with monitor:
        monitor.set_baseline()
        report, shown = make()
        report.attach_monitor(monitor)
        with report.stage("load"):
            monitor.set(status, 150)
        monitor.set(status, 100)
        with report.stage("calibrate"):
            pass
    load, calibrate = report.stages
    assert load["host_peak_bytes"] == 50 * 2**20
    assert calibrate["host_peak_bytes"] == 0
    assert 0 <= load["seconds"] < 5
    assert "load: 0.0 s, host peak 52.4 MB" in shown()


def test_a_stage_that_raises_is_recorded_as_failed():
    report, shown = make()
    with pytest.raises(KeyError), report.stage("outer"), report.stage("inner"):
        raise KeyError
    assert [(stage["name"], stage["failed"]) for stage in report.stages] == [("outer", True), ("inner", True)]
    assert "inner failed" in shown()


def test_the_stages_of_several_ranks_are_said_to_be_those_of_the_first():
    report, shown = make()
    with report.stage("load"):
        pass
    report.print_summary()
    assert "\nstages " in shown()
    report.record("ranks", [{"rank": 0, "host peak bytes": 5_000_000}, {"rank": 1, "host peak bytes": 7_000_000}])
    report.print_summary()
    ranks, stages = shown().rpartition("\nranks ")[2].split("\nstages of rank 0 ")
    assert "7 MB" in ranks
    assert "load" in stages


def test_what_is_not_watched_is_said_and_written(tmp_path):
    report, shown = make()
    with MemoryMonitor(status_file=tmp_path / "nosuch") as monitor:
        report.attach_monitor(monitor)
    assert "host memory is not watched" in shown()
    assert "host memory is not watched" in report.as_dict()["memory_not_watched"][0]


def test_progress_without_a_terminal_leaves_one_line_with_a_rate(monkeypatch):
    clock = iter([0.0, 0.1, 0.2, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0])
    monkeypatch.setattr(report_module.time, "perf_counter", lambda: next(clock))
    report, shown = make()
    with report.progress("load", 400_000_000, "bytes") as advance:
        advance(100_000_000)
        advance(300_000_000)
    assert shown() == "   load: 400 MB in 4.0 s (100 MB/s)\n"


@pytest.mark.parametrize(
    ("count", "rate"),
    [(2, "0.5 tokens/s"), (1333, "333.2 tokens/s"), (8000, "2,000 tokens/s"), (3 * 10**8, "75,000,000 tokens/s")],
)
def test_rates_are_told_in_digits(monkeypatch, count, rate):
    now = [0.0]
    monkeypatch.setattr(report_module.time, "perf_counter", lambda: now[0])
    report, shown = make()
    with report.progress("calibrate", count, "tokens") as advance:
        now[0] = 4.0
        advance(count)
    assert shown() == f"   calibrate: {count:,} tokens in 4.0 s ({rate})\n"


def test_a_long_progress_without_a_terminal_speaks_once_a_minute(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(report_module.time, "perf_counter", lambda: now[0])
    report, shown = make()
    with report.progress("calibrate", 8, "rows") as advance:
        for _ in range(8):
            now[0] += 25
            advance()
    assert shown().splitlines() == [
        "   calibrate: 3 of 8 rows, 0.04 rows/s",
        "   calibrate: 6 of 8 rows, 0.04 rows/s",
        "   calibrate: 8 rows in 200.0 s (0.04 rows/s)",
    ]


def test_progress_counts_from_many_threads_and_nests_on_a_terminal():
    report, shown = make(terminal=True)
    with report.progress("outer", 4000, "tensors") as advance, report.progress("inner", 1, "rows") as inner:
        threads = [threading.Thread(target=lambda: [advance() for _ in range(1000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        inner()
    assert "inner: 1 rows in" in shown()
    assert "outer: 4,000 tensors in" in shown()


def test_the_summary_shows_sections_by_their_shape():
    report, shown = make()
    report.record("plan", "single")
    report.record("bytes", {"source": 2_000_000_000, "exported": 700_000_000, "effective_bits": 4.53125})
    report.record("signal_to_noise", {"mlp": {"mean_db": 20.5, "worst": "model.layers.3.mlp.up_proj"}, "attention": {}})
    report.record("previews", {"before": "once upon", "after": "a time"})
    report.record("data", [{"name": f"set{i}", "rows": i} for i in range(20)])
    report.print_summary()
    text = shown()
    numbers = ("2 GB", "700 MB", "4.531", "20.5")
    for part in (*numbers, "single", "model.layers.3.mlp.up_proj", "once upon", "set11", "8 more in"):
        assert part in text, part
    assert "set12" not in text
    header = next(line for line in text.splitlines() if "before" in line)
    assert "after" in header, "previews stand side by side"
