"""Memory of this process and its GPUs: read now, and watched for peaks by a thread.

Host. Three kinds of pages are told apart, because only one of them can run a machine out of memory. Anonymous pages
(RssAnon) are what the process allocated; file pages (RssFile) are the source's mapped weights, which the kernel drops
when it needs room; shared pages (RssShmem) are memory files. Pinned buffers belong to the CUDA driver and count in none
of the three: the caller, who knows torch, passes a callable for them.

    held = anonymous + pinned - (anonymous + pinned after the imports)

GPU. NVML's `used` is the whole card, other processes included. NVML numbers cards without looking at
CUDA_VISIBLE_DEVICES, so devices are found by UUID, never by index. Where it cannot report (no driver, MIG, unified
memory) the device is left out, and `notes` says so in a line.

What this file does not know: torch, stages' names, and how the numbers are shown.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pynvml

STATUS_FILE = Path("/proc/self/status")
SAMPLE_SECONDS = 0.02
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
LARGE_BLOCK = 4 << 20


@dataclass(frozen=True)
class HostMemory:
    """Resident host memory of one process, in bytes."""

    anonymous: int
    file: int
    shared: int
    pinned: int

    @property
    def held(self) -> int:
        """Bytes that the kernel cannot drop: anonymous plus pinned."""
        return self.anonymous + self.pinned


@dataclass(frozen=True)
class MemoryPeaks:
    """Highest values of a stretch of time, in bytes; each kind has its own moment."""

    host_held: int | None
    """Anonymous plus pinned, minus the baseline; None where the system does not tell."""
    host_file: int | None
    host_shared: int | None
    gpu_used: dict[str, int] = field(default_factory=dict)
    """Per watched device ("cuda:0"): the card's used memory, of all processes."""


def read_host_memory(
    pinned_bytes: Callable[[], int] | None = None, status_file: Path = STATUS_FILE
) -> HostMemory | None:
    """This process's memory now, or None where the system has no /proc/self/status with the RSS split."""
    try:
        text = status_file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    kibibytes = {
        key: int(value.split()[0])
        for key, _, value in (line.partition(":") for line in text.splitlines())
        if key in ("RssAnon", "RssFile", "RssShmem")
    }
    if len(kibibytes) < 3:
        return None
    pinned = pinned_bytes() if pinned_bytes else 0
    return HostMemory(kibibytes["RssAnon"] * 1024, kibibytes["RssFile"] * 1024, kibibytes["RssShmem"] * 1024, pinned)


def return_large_blocks() -> None:
    """Let glibc give memory of LARGE_BLOCK bytes or more back to the system as soon as it is freed.

    By itself it raises that limit to 32 MiB when blocks come and go, and keeps them in its heap, where blocks of many
    sizes leave holes: layers that FSDP2 gathers and frees on a CPU then take up several times their size. No stage was
    found to be slower for it. Other C libraries have no such limit, and nothing is done.
    """
    setter = getattr(ctypes.CDLL(None), "mallopt", None)
    if setter is not None:
        setter(M_MMAP_THRESHOLD, LARGE_BLOCK)


class Window:
    """A stretch of time whose peaks are kept; made by `MemoryMonitor.mark`."""

    def __init__(self) -> None:
        self.held: int | None = None
        self.file: int | None = None
        self.shared: int | None = None
        self.gpu: dict[str, int] = {}

    def add(self, host: HostMemory | None, gpu: dict[str, int]) -> None:
        """Take one sample in."""
        if host is not None:
            self.held = max(self.held or 0, host.held)
            self.file = max(self.file or 0, host.file)
            self.shared = max(self.shared or 0, host.shared)
        for device, used in gpu.items():
            self.gpu[device] = max(self.gpu.get(device, 0), used)


class MemoryMonitor:
    """Samples memory in a thread between `start` and `stop`, or inside `with`.

    `uuids`: of the devices to watch, by the names that the peaks shall have, or a sequence: these are called cuda:0,
    cuda:1 ... Each with or without the "GPU-" in front. `pinned_bytes`: pinned host memory of this process, in bytes;
    it is called from the sampling thread.
    """

    def __init__(
        self,
        uuids: Mapping[str, str] | Sequence[str] = (),
        pinned_bytes: Callable[[], int] | None = None,
        *,
        sample_seconds: float = SAMPLE_SECONDS,
        nvml: Any = pynvml,
        status_file: Path = STATUS_FILE,
    ) -> None:
        self.notes: list[str] = []
        """One line for everything that could not be watched."""
        self.baseline: HostMemory | None = None
        self._uuids = dict(uuids) if isinstance(uuids, Mapping) else {f"cuda:{i}": u for i, u in enumerate(uuids)}
        self._pinned_bytes = pinned_bytes
        self._sample_seconds = sample_seconds
        self._nvml = nvml
        self._status_file = status_file
        self._nvml_is_open = False
        self._handles: dict[str, Any] = {}
        self._whole = Window()
        self._windows: list[Window] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> Self:
        """Open NVML, find the devices, take the first sample and start the thread. Raises nothing: see `notes`."""
        if self._thread is not None:
            return self
        self._open_devices(self._uuids)
        if read_host_memory(None, self._status_file) is None:
            self.notes.append(f"host memory is not watched: {self._status_file} does not split it by kind")
        self._stopping.clear()
        self._sample()
        self._thread = threading.Thread(target=self._loop, name="hf-ptq memory monitor", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Join the thread, take a last sample and close NVML. A second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if not thread.is_alive():
            self.notes.append("the memory monitor's thread ended early: peaks are lower bounds")
        self._stopping.set()
        thread.join()
        try:
            self._sample()
        finally:
            self._close_nvml()

    def set_baseline(self) -> None:
        """Call when the imports are done: host peaks are told relative to now."""
        self.baseline = read_host_memory(self._pinned_bytes, self._status_file)

    def watch(self, uuids: Mapping[str, str]) -> list[str]:
        """Watch these devices too from now on, by the names given; returns the notes on those that cannot be.

        A name that is watched already stays the device that it is. Raises nothing.
        """
        added = {device: uuid for device, uuid in uuids.items() if device not in self._uuids}
        with self._lock:
            self._uuids |= added
            if self._thread is None:
                return []  # `start` finds them
            known = len(self.notes)
            self._open_devices(added)
            return self.notes[known:]

    def mark(self) -> Window:
        """Start a window; `peaks(window)` ends it. Windows may overlap."""
        window = Window()
        with self._lock:
            self._windows.append(window)
        if self._thread is not None:
            self._sample()
        return window

    def peaks(self, window: Window | None = None) -> MemoryPeaks:
        """The peaks since `mark` returned this window, which ends it; without one, those since `start`."""
        if self._thread is not None:
            self._sample()
        with self._lock:
            if window in self._windows:
                self._windows.remove(window)
            seen = window or self._whole
            base = self.baseline.held if self.baseline else 0
            held = None if seen.held is None else max(seen.held - base, 0)
            return MemoryPeaks(held, seen.file, seen.shared, dict(seen.gpu))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _loop(self) -> None:
        while not self._stopping.wait(self._sample_seconds):
            self._sample()

    def _sample(self) -> None:
        with self._lock:  # one sample at a time, so that a device given up here is given up once
            host = read_host_memory(self._pinned_bytes, self._status_file)
            gpu = self._read_devices()
            for window in (self._whole, *self._windows):
                window.add(host, gpu)

    def _read_devices(self) -> dict[str, int]:
        used: dict[str, int] = {}
        for device, handle in tuple(self._handles.items()):
            try:
                used[device] = int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
            except self._nvml.NVMLError as error:
                self.notes.append(f"{device} is no longer watched: NVML says {error}")
                del self._handles[device]
        return used

    def _open_devices(self, uuids: Mapping[str, str]) -> None:
        """Add to `_handles`. NVML counts its users, so each init is paid back by one shutdown."""
        if not uuids or not (self._nvml_is_open or self._open_nvml()):
            return
        for device, uuid in uuids.items():
            try:
                self._handles[device] = self._probe(uuid)
            except self._nvml.NVMLError as error:
                self.notes.append(f"{device} ({uuid}) is not watched: NVML says {error}")
            except _PartOfACardError:
                self.notes.append(f"{device} ({uuid}) is not watched: NVML reports the whole card, not a MIG instance")
        if not self._handles:
            self._close_nvml()

    def _open_nvml(self) -> bool:
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            self.notes.append(f"GPU memory is not watched: NVML says {error}")
            return False
        self._nvml_is_open = True
        return True

    def _close_nvml(self) -> None:
        self._handles = {}
        if self._nvml_is_open:
            self._nvml_is_open = False
            self._nvml.nvmlShutdown()

    def _probe(self, uuid: str) -> Any:
        """The handle of a device that can report its memory; raises NVMLError or `_PartOfACardError`."""
        if uuid.startswith("MIG-"):
            raise _PartOfACardError
        handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        try:
            current_mode, _ = self._nvml.nvmlDeviceGetMigMode(handle)
        except self._nvml.NVMLError_NotSupported:
            current_mode = 0  # a card that has no MIG at all
        if current_mode:
            raise _PartOfACardError
        self._nvml.nvmlDeviceGetMemoryInfo(handle)
        return handle


class _PartOfACardError(Exception):
    """The device is a MIG instance."""
