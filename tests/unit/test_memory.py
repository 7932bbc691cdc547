"""The memory monitor, on a fake NVML and a fake /proc/self/status."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from hf_ptq import steps
from hf_ptq.distributed.plan import Plan
from hf_ptq.distributed.process_group import DistributedState
from hf_ptq.memory import HostMemory, MemoryMonitor, read_host_memory
from hf_ptq.report import Report

MIB = 2**20


class FakeError(Exception):
    """NVMLError."""


class FakeNotSupportedError(FakeError):
    """NVMLError_NotSupported."""


@dataclass
class FakeNvml:
    """As much of pynvml as the monitor uses. Every call but init needs an initialised library, as the real one does."""

    used: dict[str, int] = field(default_factory=dict)  # UUID -> bytes
    mig: set[str] = field(default_factory=set)
    unified: set[str] = field(default_factory=set)
    has_driver: bool = True
    inits: int = 0
    shutdowns: int = 0
    threads: set[str] = field(default_factory=set)

    NVMLError = FakeError
    NVMLError_NotSupported = FakeNotSupportedError

    def nvmlInit(self):
        if not self.has_driver:
            raise FakeError("Driver Not Loaded")
        self.inits += 1

    def nvmlShutdown(self):
        self._check()
        self.shutdowns += 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self._check()
        if uuid not in self.used:
            raise FakeError("Not Found")
        return uuid

    def nvmlDeviceGetMigMode(self, handle):
        self._check()
        if handle in self.unified:
            raise FakeNotSupportedError("Not Supported")
        return [int(handle in self.mig), 0]

    def nvmlDeviceGetMemoryInfo(self, handle):
        self._check()
        self.threads.add(threading.current_thread().name)
        if handle in self.unified:
            raise FakeNotSupportedError("Not Supported")
        if handle not in self.used:
            raise FakeError("GPU is lost")
        return SimpleNamespace(used=self.used[handle])

    def _check(self):
        if self.inits <= self.shutdowns:
            raise FakeError("Uninitialized")


@pytest.fixture
def status(tmp_path):
    """A status file with 10 MiB anonymous, 20 MiB file, 1 MiB shared; `write` changes it."""
    path = tmp_path / "status"

    def write(anonymous_mib, file_mib=20, shared_mib=1):
        text = f"Name:\tx\nRssAnon:\t  {anonymous_mib * 1024} kB\nRssFile:\t {file_mib * 1024} kB\n"
        new = path.with_suffix(".new")
        new.write_text(text + f"RssShmem:\t {shared_mib * 1024} kB\nThreads:\t1\n")
        new.replace(path)  # the sampling thread never sees half a file

    write(10)
    return SimpleNamespace(path=path, write=write)


def wait_until(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "the sampling thread did not come round"
        time.sleep(0.002)


def test_status_file_is_read_in_bytes(status):
    memory = read_host_memory(lambda: 5, status.path)
    assert memory == HostMemory(anonymous=10 * MIB, file=20 * MIB, shared=1 * MIB, pinned=5)
    assert memory.held == 10 * MIB + 5


@pytest.mark.parametrize("text", [None, "Name:\tx\nVmRSS:\t 5 kB\n"])
def test_no_split_by_kind_is_none_and_a_note(tmp_path, text):
    path = tmp_path / "status"
    if text is not None:
        path.write_text(text)
    assert read_host_memory(None, path) is None
    with MemoryMonitor(status_file=path) as monitor:
        pass
    assert monitor.peaks().host_held is None
    assert len(monitor.notes) == 1
    assert "host memory is not watched" in monitor.notes[0]


def test_this_process_is_seen():
    """On Linux the real file is read, and 64 MiB that are touched and held show up as held.

    In a process of its own: what other tests free meanwhile would be taken off.
    """
    if read_host_memory() is None:
        pytest.skip("no /proc/self/status with the RSS split")
    program = """
from hf_ptq.memory import MemoryMonitor
with MemoryMonitor() as monitor:
    monitor.set_baseline()
    window = monitor.mark()
    block = bytearray(b"x") * (64 << 20)
    print(monitor.peaks(window).host_held)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert 64 * MIB <= int(done.stdout) < 128 * MIB


def test_peaks_between_samples_come_from_the_thread(status):
    nvml = FakeNvml({"GPU-a": 100})
    monitor = MemoryMonitor(["GPU-a"], sample_seconds=0.001, nvml=nvml, status_file=status.path).start()
    monitor.set_baseline()
    window = monitor.mark()
    status.write(50, 60)
    nvml.used["GPU-a"] = 900
    wait_until(lambda: window.gpu.get("cuda:0") == 900 and window.held == 50 * MIB)
    status.write(10, 20)
    nvml.used["GPU-a"] = 100
    peaks = monitor.peaks(window)
    monitor.stop()
    assert peaks.host_held == 40 * MIB  # 50 at the peak, 10 after the imports
    assert peaks.host_file == 60 * MIB
    assert peaks.host_shared == 1 * MIB
    assert peaks.gpu_used == {"cuda:0": 900}
    assert "hf-ptq memory monitor" in nvml.threads


def test_windows_may_overlap_and_end(status):
    monitor = MemoryMonitor(status_file=status.path, sample_seconds=60).start()
    outer = monitor.mark()
    status.write(30)
    inner = monitor.mark()
    assert monitor.peaks(inner).host_held == 30 * MIB
    status.write(80)
    late = monitor.mark()
    status.write(40)
    assert monitor.peaks(outer).host_held == 80 * MIB
    assert monitor.peaks(late).host_held == 80 * MIB
    monitor.stop()
    assert monitor.peaks(inner).host_held == 30 * MIB, "an ended window takes no more samples"
    assert monitor.peaks().host_held == 80 * MIB


def test_pinned_bytes_count_as_held_and_the_baseline_is_taken_off(status):
    pinned = [7]
    with MemoryMonitor(pinned_bytes=lambda: pinned[0], status_file=status.path, sample_seconds=60) as monitor:
        monitor.set_baseline()
        pinned[0] = 1007
    assert monitor.peaks().host_held == 1000


def test_devices_are_found_by_uuid_in_the_callers_order(status):
    """CUDA_VISIBLE_DEVICES=1,0 of three: torch's cuda:0 is NVML's second card. torch writes UUIDs without GPU-."""
    nvml = FakeNvml({"GPU-a": 1, "GPU-b": 2, "GPU-c": 3})
    with MemoryMonitor(["b", "GPU-a"], nvml=nvml, status_file=status.path) as monitor:
        pass
    assert monitor.peaks().gpu_used == {"cuda:0": 2, "cuda:1": 1}
    assert monitor.notes == []
    assert (nvml.inits, nvml.shutdowns) == (1, 1)


def test_devices_have_the_names_that_the_caller_gives(status):
    nvml = FakeNvml({"GPU-a": 1, "GPU-b": 2})
    with MemoryMonitor({"cuda:1": "b"}, nvml=nvml, status_file=status.path) as monitor:
        pass
    assert monitor.peaks().gpu_used == {"cuda:1": 2}


def test_mig_and_unified_memory_are_left_out_with_a_line(status):
    nvml = FakeNvml({"GPU-a": 1, "GPU-b": 2, "GPU-c": 3}, mig={"GPU-a"}, unified={"GPU-b"})
    uuids = ["GPU-a", "GPU-b", "GPU-c", "MIG-d"]
    with MemoryMonitor(uuids, nvml=nvml, status_file=status.path) as monitor:
        pass
    assert monitor.peaks().gpu_used == {"cuda:2": 3}
    notes = "\n".join(monitor.notes)
    assert "cuda:0 (GPU-a) is not watched: NVML reports the whole card, not a MIG instance" in notes
    assert "cuda:1 (GPU-b) is not watched: NVML says Not Supported" in notes
    assert "cuda:3 (MIG-d) is not watched" in notes
    assert (nvml.inits, nvml.shutdowns) == (1, 1)


def test_nothing_to_watch_closes_nvml_at_once(status):
    nvml = FakeNvml({"GPU-a": 1}, mig={"GPU-a"})
    monitor = MemoryMonitor(["GPU-a", "GPU-x"], nvml=nvml, status_file=status.path).start()
    assert (nvml.inits, nvml.shutdowns) == (1, 1)
    monitor.stop()
    assert (nvml.inits, nvml.shutdowns) == (1, 1)
    assert monitor.peaks().gpu_used == {}
    assert "cuda:1 (GPU-x) is not watched: NVML says Not Found" in monitor.notes


def test_no_driver_is_a_line_and_no_shutdown(status):
    nvml = FakeNvml(has_driver=False)
    with MemoryMonitor(["GPU-a"], nvml=nvml, status_file=status.path) as monitor:
        pass
    assert monitor.notes == ["GPU memory is not watched: NVML says Driver Not Loaded"]
    assert (nvml.inits, nvml.shutdowns) == (0, 0)
    assert monitor.peaks().host_held == 10 * MIB, "host memory is watched without a GPU"


def test_without_devices_nvml_is_not_touched(status):
    nvml = FakeNvml()
    with MemoryMonitor(nvml=nvml, status_file=status.path):
        pass
    assert (nvml.inits, nvml.shutdowns) == (0, 0)


def test_stop_joins_before_the_peaks_and_may_come_twice(status):
    nvml = FakeNvml({"GPU-a": 1})
    before = set(threading.enumerate())
    monitor = MemoryMonitor(["GPU-a"], nvml=nvml, sample_seconds=60, status_file=status.path).start()
    assert monitor.start() is monitor, "a second start does nothing"
    nvml.used["GPU-a"] = 77
    monitor.stop()  # takes a last sample, though the thread's next one is a minute away
    assert set(threading.enumerate()) == before
    assert monitor.peaks().gpu_used == {"cuda:0": 77}
    monitor.stop()
    assert (nvml.inits, nvml.shutdowns) == (1, 1)
    assert monitor.notes == []


def test_start_after_stop_watches_again(status):
    nvml = FakeNvml({"GPU-a": 1})
    monitor = MemoryMonitor(["GPU-a"], nvml=nvml, status_file=status.path)
    for _ in range(2):
        with monitor:
            pass
    assert (nvml.inits, nvml.shutdowns) == (2, 2)


def test_a_device_that_gets_lost_is_told_once(status):
    nvml = FakeNvml({"GPU-a": 5, "GPU-b": 6})
    monitor = MemoryMonitor(["GPU-a", "GPU-b"], nvml=nvml, sample_seconds=0.001, status_file=status.path).start()
    del nvml.used["GPU-a"]
    wait_until(lambda: monitor.notes)
    nvml.used["GPU-b"] = 60
    monitor.stop()
    assert monitor.notes == ["cuda:0 is no longer watched: NVML says GPU is lost"]
    assert monitor.peaks().gpu_used == {"cuda:0": 5, "cuda:1": 60}
    assert (nvml.inits, nvml.shutdowns) == (1, 1)


def test_devices_that_are_added_later_are_watched_from_then_on(status):
    nvml = FakeNvml({"GPU-a": 5, "GPU-b": 60, "GPU-m": 1}, mig={"GPU-m"})
    with MemoryMonitor({"cuda:0": "a"}, nvml=nvml, sample_seconds=60, status_file=status.path) as monitor:
        before = monitor.mark()
        assert monitor.peaks(before).gpu_used == {"cuda:0": 5}
        window = monitor.mark()
        told = monitor.watch({"cuda:0": "b", "cuda:1": "b", "cuda:2": "m", "cuda:3": "x"})
        assert told == monitor.notes
        assert [note.partition(" is not watched")[0] for note in told] == ["cuda:2 (m)", "cuda:3 (x)"]
        assert monitor.peaks(window).gpu_used == {"cuda:0": 5, "cuda:1": 60}
    assert (nvml.inits, nvml.shutdowns) == (1, 1)
    with monitor:
        pass
    assert monitor.peaks().gpu_used == {"cuda:0": 5, "cuda:1": 60}, "they are devices of this monitor"


def test_devices_may_be_added_to_a_monitor_that_has_none_or_has_not_started(status):
    nvml = FakeNvml({"GPU-a": 5})
    monitor = MemoryMonitor(nvml=nvml, sample_seconds=60, status_file=status.path)
    with monitor:
        assert monitor.watch({}) == []
        assert nvml.inits == 0
        assert monitor.watch({"cuda:0": "a"}) == []
    assert monitor.peaks().gpu_used == {"cuda:0": 5}
    assert (nvml.inits, nvml.shutdowns) == (1, 1)
    other = MemoryMonitor(nvml=nvml, status_file=status.path)
    assert other.watch({"cuda:0": "x"}) == []
    with other:
        assert other.notes == ["cuda:0 (x) is not watched: NVML says Not Found"]


def test_a_run_watches_every_gpu_of_its_device_map(status, monkeypatch):
    """The main device from the start, the others as soon as the plan names them; "cpu" and "disk" are none."""
    nvml = FakeNvml({"GPU-0": 5, "GPU-1": 6})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda name: SimpleNamespace(uuid=str(name)[-1]))
    made = partial(MemoryMonitor, nvml=nvml, status_file=status.path)
    monkeypatch.setattr(steps, "MemoryMonitor", made)
    report = Report(Console(quiet=True))
    spread = {"embed": "cuda:0", "layers.0": "cuda:1", "layers.1": "cuda:2", "layers.2": "cpu", "head": "disk"}
    plan = Plan("device map", "cuda:0", 0, (), device_map=spread)
    with steps.watched(DistributedState(0, 1, torch.device("cuda", 0)), report) as monitor:
        steps.watch_map(monitor, plan, report)
        with report.stage("load"):
            pass
    assert report.stages[0]["gpu_peak_bytes"] == {"cuda:0": 5, "cuda:1": 6}
    assert report.as_dict()["memory_not_watched"] == ["cuda:2 (2) is not watched: NVML says Not Found"]


def test_leaving_by_an_exception_stops_too(status):
    nvml = FakeNvml({"GPU-a": 1})
    monitor = MemoryMonitor(["GPU-a"], nvml=nvml, status_file=status.path)
    with pytest.raises(KeyError), monitor:
        raise KeyError
    assert (nvml.inits, nvml.shutdowns) == (1, 1)
