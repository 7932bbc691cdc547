"""Runs from a hub id: everything is refused, and planned, before a weight is downloaded."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from local_hub import COMMIT, REPO, Hub, files_of, use
from rich.console import Console
from tiny import load_tensors, raw

from hf_ptq.checkpoint import hub as hub_module
from hf_ptq.checkpoint import room as room_module
from hf_ptq.checkpoint.source import download, downloaded, open_source
from hf_ptq.checkpointing import load
from hf_ptq.distributed.plan import Plan
from hf_ptq.errors import RunError, UserError
from hf_ptq.report import Report
from hf_ptq.sizes import exact_bytes

Quantize = Callable[..., Path]
EXACT = 8  # bytes asked for first, so that of each file no more than its header is given


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Hub]]:
    """A hub with a checkpoint as org/name, and an empty cache for it."""
    made: list[Hub] = []

    def start(source: Path, **config: object) -> Hub:
        files = files_of(source)
        files["config.json"] = json.dumps(json.loads(files["config.json"]) | config).encode()
        made.append(Hub(files))
        use(made[0], tmp_path / "cache", monkeypatch)
        return made[0]

    yield start
    for server in made:
        server.stop()


def header_bytes(body: bytes) -> int:
    return 8 + int.from_bytes(body[:8], "little")


def weights_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*.safetensors"))


def silent() -> Report:
    return Report(Console(quiet=True), verbose=False)


REFUSALS: dict[str, tuple[dict, dict, str]] = {
    "already quantized": ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantized sources are not read"),
    "unknown architecture": ({"model_type": "nobody", "auto_map": None}, {}, "does not know the model_type 'nobody'"),
    "other shapes": ({"intermediate_size": 95}, {}, "95"),
    "a recipe for nothing": ({}, {"recipe": "nothing.yaml"}, "gives no weight a format"),
    "no room": ({}, {}, "the download of org/name needs"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_come_before_the_download(case, tiny, serve, quantize, tmp_path, monkeypatch):
    config, options, said = REFUSALS[case]
    hub = serve(tiny("llama"), **config)
    monkeypatch.setattr(hub_module, "FIRST_BYTES", EXACT)
    if "recipe" in options:
        (tmp_path / "nothing.yaml").write_text('rules: [{pattern: "*", enable: false}]\n')
        options = {"recipe": str(tmp_path / "nothing.yaml")}
    if case == "no room":
        fail_room(monkeypatch)
    with pytest.raises(UserError, match=said):
        quantize(REPO, name="out", **options)
    assert hub.weights_given() == []
    assert "config.json" in hub.fetched
    given = sum(count for _, _, count in hub.ranges)
    assert given == header_bytes(hub.files["model.safetensors"])
    assert weights_in(tmp_path / "cache") == []


def fail_room(monkeypatch: pytest.MonkeyPatch) -> None:
    few = room_module.os.statvfs("/")
    few = room_module.os.statvfs_result((few.f_bsize, 1000, 1_000_000, 20, 20, *tuple(few)[5:]))
    monkeypatch.setattr(room_module.os, "statvfs", lambda _: few)


def test_no_room_says_how_much_is_missing_and_for_what(tiny, serve, quantize, tmp_path, monkeypatch):
    """The download and the export are on one disk here."""
    hub = serve(tiny("llama"))
    fail_room(monkeypatch)
    with pytest.raises(UserError) as caught:
        quantize(REPO, name="out")
    (problem,) = caught.value.problems
    size = len(hub.files["model.safetensors"])
    assert f"the download of org/name needs {exact_bytes(size)} and the export needs" in problem.what
    assert str(tmp_path / "cache" / "models--org--name" / "snapshots" / COMMIT) in problem.what
    free = int(re.search(r" has [\d.]+ .?B \(([\d,]+) bytes\) free", problem.what)[1].replace(",", ""))
    export = int(re.search(r"the export needs [\d.]+ .?B \(([\d,]+) bytes\)", problem.what)[1].replace(",", ""))
    assert f"({size + export - free:,} bytes) are missing" in problem.what
    assert "set HF_HOME" in problem.cure


def test_the_download_itself_looks_for_room_too(tiny, serve, monkeypatch):
    hub = serve(tiny("llama"))
    source = open_source(REPO, None, False, silent())
    fail_room(monkeypatch)
    with pytest.raises(UserError, match=r"the download of org/name needs .* are missing"):
        download(source)
    assert hub.weights_given() == []


def close(monkeypatch: pytest.MonkeyPatch, closed: Path) -> None:
    """Let no directory below `closed` be written to, as in a cache that somebody else owns; root may write anywhere."""
    may = os.access
    refuse = lambda path, mode: not (mode & os.W_OK and Path(path).is_relative_to(closed)) and may(path, mode)  # noqa: E731
    monkeypatch.setattr(os, "access", refuse)


@pytest.mark.parametrize("closed", ["models--org--name", f"models--org--name/snapshots/{COMMIT}", ".locks"])
@pytest.mark.parametrize("dry_run", [True, False])
def test_a_cache_that_cannot_be_written_to_is_refused_before_the_plan(
    closed, dry_run, tiny, serve, quantize, tmp_path, monkeypatch
):
    hub, cache = serve(tiny("llama")), tmp_path / "cache"
    source = open_source(REPO, None, False, silent())
    (cache / closed).mkdir(exist_ok=True)
    close(monkeypatch, cache / closed)
    for attempt in (lambda: quantize(REPO, name="out", dry_run=dry_run), lambda: download(source)):
        with pytest.raises(UserError) as caught:
            attempt()
        (problem,) = caught.value.problems
        assert problem.what.startswith("the weights of org/name are to be downloaded, and this cannot be written to: ")
        assert str(cache / closed) in problem.what
        assert problem.cure == "set HF_HOME to a directory that can be written to"
    assert hub.weights_given() == []


def test_a_full_cache_need_not_be_written_to(tiny, serve, quantize, tmp_path, monkeypatch):
    serve(tiny("llama"))
    quantize(REPO, name="first")
    close(monkeypatch, tmp_path / "cache")
    quantize(REPO, name="second", dry_run=True)


def test_a_dry_run_tells_the_size_of_the_download_and_downloads_no_weights(tiny, serve, quantize, tmp_path):
    hub, report = serve(tiny("llama")), Report(Console(record=True, width=300, quiet=False), verbose=True)
    quantize(REPO, name="out", report=report, dry_run=True)
    size = len(hub.files["model.safetensors"])
    assert f"to download: 1 files, {exact_bytes(size)}" in report.console.export_text()
    assert report.sections["source"]["to_download"] == size
    assert report.sections["source"]["commit"] == COMMIT
    assert hub.weights_given() == []
    assert [(file, first) for file, first, _ in hub.ranges] == [("model.safetensors", 0)]
    assert weights_in(tmp_path / "cache") == []
    assert not (tmp_path / "out").exists()


def test_a_run_exports_what_a_local_run_does_and_a_second_one_needs_no_network(tiny, serve, quantize, tmp_path):
    hub = serve(tiny("qwen3_moe"))
    local = load_tensors(quantize(tiny("qwen3_moe"), "nvfp4", name="local"))
    report = Report(verbose=False)
    first = load_tensors(quantize(REPO, "nvfp4", name="first", report=report))
    assert {n: raw(t) for n, t in first.items()} == {n: raw(t) for n, t in local.items()}
    assert hub.weights_given() == weights_in(tiny("qwen3_moe"))
    assert "download" in [stage["name"] for stage in report.stages]
    assert {path.name for path in (tmp_path / "first").iterdir()} == {
        path.name for path in (tmp_path / "local").iterdir()
    }
    hub.ranges.clear()
    hub.stop()
    again = load_tensors(quantize(REPO, "nvfp4", name="again"))
    assert {n: raw(t) for n, t in again.items()} == {n: raw(t) for n, t in local.items()}
    assert hub.ranges == []


@pytest.mark.parametrize("first_bytes", [EXACT, 1000, 100_000])
@pytest.mark.parametrize("knows_ranges", [True, False])
def test_headers_from_the_hub_are_those_on_the_disk(first_bytes, knows_ranges, tiny, serve, monkeypatch):
    hub = serve(tiny("llama"))
    hub.knows_ranges = knows_ranges
    monkeypatch.setattr(hub_module, "FIRST_BYTES", first_bytes)
    source, local = open_source(REPO, None, False, silent()), open_source(str(tiny("llama")), None, False, silent())
    assert list(source.tensors.items()) == list(local.tensors.items())
    assert source.download_bytes == len(hub.files["model.safetensors"])
    beginning = source.elsewhere["model.safetensors"]
    assert beginning.start == hub.files["model.safetensors"][: header_bytes(beginning.start)]


FAULTS = ["cut", "stall", "short"]


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    monkeypatch.setattr(hub_module, "RETRY_SECONDS", (0.0, 0.0))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_range_that_breaks_once_is_asked_for_again(fault, tiny, serve, impatient):
    hub = serve(tiny("llama"))
    hub.faults = [fault]
    source, local = open_source(REPO, None, False, silent()), open_source(str(tiny("llama")), None, False, silent())
    assert list(source.tensors.items()) == list(local.tensors.items())
    assert hub.faults == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_range_that_breaks_again_and_again_ends_the_run(fault, tiny, serve, impatient):
    hub = serve(tiny("llama"))
    hub.faults = [fault] * 100
    with pytest.raises(RunError) as caught:
        open_source(REPO, None, False, silent())
    (problem,) = caught.value.problems
    asked = min(hub_module.FIRST_BYTES, len(hub.files["model.safetensors"]))
    assert problem.what.startswith(f"model.safetensors of {REPO} on the hub: it sent 20 of {asked} bytes asked for")
    assert problem.cure.startswith("try again")
    assert len(hub.faults) == 97


@pytest.mark.parametrize("status", [403, 416])
def test_a_hub_that_gives_no_ranges_of_a_file(status, tiny, serve):
    hub = serve(tiny("llama"))
    hub.faults = [status] * 100
    with pytest.raises(RunError, match=rf"fetching {REPO} failed: .*{status}"):
        open_source(REPO, None, False, silent())
    assert len(hub.faults) == 99


@pytest.mark.parametrize("missing_bytes", [1, 4, 7, 8])
def test_a_header_of_which_few_bytes_are_missing_after_the_first_request(missing_bytes, tiny, serve, monkeypatch):
    hub = serve(tiny("llama"))
    end = header_bytes(hub.files["model.safetensors"])
    monkeypatch.setattr(hub_module, "FIRST_BYTES", end - missing_bytes)
    source, local = open_source(REPO, None, False, silent()), open_source(str(tiny("llama")), None, False, silent())
    assert list(source.tensors.items()) == list(local.tensors.items())
    assert [(first, count) for _, first, count in hub.ranges] == [
        (0, end - missing_bytes),
        (end - missing_bytes, missing_bytes),
    ]


def test_a_damaged_file_is_named_before_it_is_downloaded(tiny, serve):
    hub = serve(tiny("llama"))
    hub.files["model.safetensors"] = hub.files["model.safetensors"][:-10]
    with pytest.raises(UserError, match=r"model\.safetensors of org/name on the hub: truncated.*lm_head|truncated"):
        open_source(REPO, None, False, silent())
    assert hub.weights_given() == []


def test_files_that_another_commit_has_are_not_downloaded_again(tiny, serve, quantize, tmp_path):
    hub = serve(tiny("llama"))
    quantize(REPO, name="first")
    (tmp_path / "cache" / "models--org--name" / "snapshots" / COMMIT / "model.safetensors").unlink()
    source = open_source(REPO, None, False, silent())
    assert source.download_bytes == 0
    assert list(source.tensors) == list(open_source(str(tiny("llama")), None, False, silent()).tensors)
    assert hub.weights_given() == ["model.safetensors"]


SPOILED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "other names": (lambda body: body.replace(b"up_proj", b"xy_proj"), "model.safetensors"),
    "a part": (lambda body: body[:-10], "truncated: "),
    "a page": (lambda _: b"<html>busy</html>" * 100, "corrupt: "),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_download_that_is_not_what_was_planned_with_can_be_made_again(case, tiny, serve):
    spoil, reason = SPOILED[case]
    hub = serve(tiny("llama"))
    source = open_source(REPO, None, False, silent())
    download(source)
    file = source.directory / "model.safetensors"
    blob = file.resolve()
    blob.write_bytes(spoil(hub.files["model.safetensors"]))
    with pytest.raises(RunError) as caught:
        downloaded(source)
    (problem,) = caught.value.problems
    assert problem.what.startswith(f"{REPO}: what was downloaded is not what the hub's headers said: ")
    assert reason in problem.what
    assert problem.cure == f"remove {blob}, and run again"
    blob.unlink()
    again = open_source(REPO, None, False, silent())
    download(again)
    assert downloaded(again).tensors == source.tensors
    assert hub.weights_given() == ["model.safetensors"] * 2


def test_the_library_downloads_what_it_loads(tiny, serve):
    hub = serve(tiny("llama"))
    model = load(REPO, Plan("single", "cpu", 0, ()))
    assert hub.weights_given() == ["model.safetensors"]
    theirs = load_tensors(tiny("llama"))["model.norm.weight"]
    assert raw(model.state_dict()["model.norm.weight"]) == raw(theirs)
