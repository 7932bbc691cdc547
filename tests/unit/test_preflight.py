"""Which CUDA devices are there, asked without torch."""

from __future__ import annotations

import pytest

import hf_ptq.preflight as preflight_module


class FakeNvml:
    """Two GPUs, or no driver."""

    class NVMLError(Exception):
        """As pynvml's."""

    def __init__(self, uuids=("GPU-aa", "GPU-ab")):
        self.uuids = uuids
        self.open = 0

    def nvmlInit(self):
        if self.uuids is None:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, i):
        return i

    def nvmlDeviceGetUUID(self, handle):
        return self.uuids[handle]


@pytest.fixture
def nvml(monkeypatch):
    """Puts a fake NVML and a CUDA build of torch in place; give it uuids and CUDA_VISIBLE_DEVICES."""

    def put(uuids=("GPU-aa", "GPU-ab"), visible=None):
        fake = FakeNvml(uuids)
        monkeypatch.setattr(preflight_module, "pynvml", fake)
        monkeypatch.setattr(preflight_module.metadata, "version", lambda name: "2.13.0")
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return fake

    return put


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:1"])
def test_devices_that_are_there(nvml, device):
    fake = nvml()
    assert preflight_module.missing_device(device) == []
    assert fake.open == 0, "NVML is closed again"


def test_a_device_beyond_the_last_is_refused(nvml):
    nvml()
    (problem,) = preflight_module.missing_device("cuda:2")
    assert "--device cuda:2 is not there: this process sees 2 CUDA devices" in problem.what
    assert problem.cure == "use cuda:0 to cuda:1"


@pytest.mark.parametrize(("visible", "device"), [("", "cuda"), ("-1", "cuda"), ("1", "cuda:1"), ("GPU-ab", "cuda:1")])
def test_devices_hidden_by_the_environment_are_not_there(nvml, visible, device):
    nvml(visible=visible)
    (problem,) = preflight_module.missing_device(device)
    assert f"CUDA_VISIBLE_DEVICES={visible!r}" in problem.what


def test_no_driver_is_told(nvml):
    nvml(uuids=None)
    (problem,) = preflight_module.missing_device("cuda")
    assert "no NVIDIA driver answers (NVML says Driver Not Loaded)" in problem.what


def test_a_torch_without_cuda_is_told(nvml, monkeypatch):
    nvml()
    monkeypatch.setattr(preflight_module.metadata, "version", lambda name: "2.13.0+cpu")
    (problem,) = preflight_module.missing_device("cuda:0")
    assert "torch 2.13.0+cpu is built without CUDA" in problem.what


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 3),
        ("", 0),
        ("0,2", 2),
        ("0, 1", 2),
        ("2,7,1", 1),
        ("-1,0", 0),
        ("GPU-ab,GPU-b", 2),
        ("GPU-a", 0),
        ("0,0", 0),
        ("GPU-aa,0", 0),
        ("MIG-x", 1),
        ("nonsense", 0),
    ],
)
def test_visible_devices_are_counted_as_the_driver_does(visible, count):
    """GPU-a is the beginning of two UUIDs, so it names none."""
    assert preflight_module.count_visible(visible, ["GPU-aa", "GPU-ab", "GPU-b"]) == count
