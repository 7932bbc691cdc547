"""Hub ids: a hub made of a local server, a cache made by hand, and every way the hub can say no."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from checkpoint_files import write_checkpoint
from huggingface_hub import constants, errors
from local_hub import COMMIT, Hub, environment
from rich.console import Console

from hf_ptq.checkpoint.hub import _literally, _take, fetch_small_files, is_hub_id
from hf_ptq.checkpoint.source import open_source
from hf_ptq.errors import RunError, UserError
from hf_ptq.report import Report

NEEDED = ("config.json", "tokenizer.json", "README.md", "modeling_x.py", "code/deep.py")
SMALL = {name: name.encode() for name in NEEDED}
UNWANTED = ("pytorch_model.bin", "x.gguf", "original/a.safetensors", "consolidated.safetensors")
HEAVY = {name: name.encode() for name in UNWANTED}


@pytest.fixture
def hub():
    made = []

    def make(files):
        made.append(Hub(files))
        return made[-1]

    yield make
    for server in made:
        server.stop()


def fetch_in_process(home: Path, url: str, repo: str = "org/name", revision: str | None = None):
    """All three fetches in a process of its own, since huggingface_hub reads its environment when it is imported."""
    code = (
        "import sys, json; from hf_ptq.checkpoint.hub import fetch_headers, fetch_small_files, fetch_weights\n"
        f"d, c = fetch_small_files({repo!r}, {revision!r})\n"
        f"if h := fetch_headers({repo!r}, c, d): fetch_weights({repo!r}, c, d, h)\n"
        "print(json.dumps([str(d), c, sorted(str(p.relative_to(d)) for p in d.rglob('*') if p.is_file())]))"
    )
    variables = os.environ | environment(home, url)
    for name in ("HF_HUB_CACHE", "HF_TOKEN"):
        variables.pop(name, None)
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr


def index(*names: str) -> bytes:
    return json.dumps({"weight_map": {str(i): name for i, name in enumerate(names)}}).encode()


WEIGHTS = {
    "the files an index names": (
        {"model.safetensors.index.json": index("a-1.safetensors", "part[1]/b.safetensors"), "a-1.safetensors": b"1"}
        | {"part[1]/b.safetensors": b"2", "a-2.safetensors": b"other", "part1/b.safetensors": b"other"},
        ["a-1.safetensors", "model.safetensors.index.json", "part[1]/b.safetensors"],
    ),
    "else model.safetensors": (
        {"model.safetensors": b"1", "model.fp32.safetensors": b"2", "below/model.safetensors": b"3"},
        ["model.safetensors"],
    ),
    "else all at the top": (
        {"one.safetensors": b"1", "two.safetensors": b"2", "below/three.safetensors": b"3"},
        ["one.safetensors", "two.safetensors"],
    ),
    "else none": ({}, []),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_only_what_is_needed_is_fetched(tmp_path, hub, case):
    files, wanted = WEIGHTS[case]
    server = hub(SMALL | HEAVY | files)
    directory, commit, found = fetch_in_process(tmp_path, server.url)
    assert commit == COMMIT
    assert Path(directory).name == COMMIT
    assert found == sorted([*SMALL, *wanted])
    assert sorted(server.fetched) == found


def test_a_second_run_fetches_nothing_and_one_without_a_network_works(tmp_path, hub):
    server = hub(SMALL | {"model.safetensors": b"1"})
    first = fetch_in_process(tmp_path, server.url)
    server.fetched.clear()
    assert fetch_in_process(tmp_path, server.url) == first
    assert server.fetched == []
    assert fetch_in_process(tmp_path, "http://127.0.0.1:1") == first


def test_no_network_and_nothing_cached_names_the_cache(tmp_path):
    said = fetch_in_process(tmp_path, "http://127.0.0.1:1")
    assert f"the hub does not answer for org/name, which is not (or not wholly) in the cache {tmp_path}" in said
    assert "check the network and HF_ENDPOINT" in said


def test_unknown_names_and_revisions_are_named(tmp_path, hub):
    server = hub(SMALL)
    assert "org/other is no directory here and no model on the hub" in fetch_in_process(
        tmp_path, server.url, "org/other"
    )
    said = fetch_in_process(tmp_path, server.url, revision="v7")
    assert "--revision: org/name has no revision 'v7'" in said


def test_a_hub_that_keeps_its_files_is_named(tmp_path, hub):
    server = hub(SMALL)
    server.file_status = 403
    assert "UserError: the hub does not answer for org/name" in fetch_in_process(tmp_path, server.url)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A hub cache made by hand that knows commit COMMIT of org/name as main; no network."""
    repository = tmp_path / "hub" / "models--org--name"
    write_checkpoint(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return repository


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_offline_works_from_the_cache(cache, revision):
    source = open_source("org/name", revision, False, Report(Console(quiet=True)))
    assert source.directory == cache / "snapshots" / COMMIT
    assert source.commit == COMMIT
    assert source.origin == "org/name"
    assert list(source.tensors) == ["embed", "norm", "head"]


@pytest.mark.parametrize(("repo", "revision"), [("org/name", "other"), ("org/name", "f" * 40), ("org/absent", None)])
def test_offline_and_not_cached_says_what_to_do(cache, repo, revision):
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set") as caught:
        fetch_small_files(repo, revision)
    assert f"run once without HF_HUB_OFFLINE, or `hf download {repo}`" in str(caught.value)
    assert str(cache.parent) in str(caught.value)


def test_offline_with_a_weight_file_missing_names_it(cache):
    (cache / "snapshots" / COMMIT / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"missing: model-00002-of-00002\.safetensors"):
        open_source("org/name", None, False, Report(Console(quiet=True)))


def raising(error: type[Exception]):
    """A snapshot_download that raises `error`, as an answer of the hub where it is one."""
    response = SimpleNamespace(status_code=403, headers={}, request=None, json=dict, text="")

    def download(*_args, **_kwargs):
        raise error("no", response=response) if issubclass(error, errors.HfHubHTTPError) else error("no")  # type: ignore

    return download


REFUSALS = [
    (errors.GatedRepoError, UserError, "org/name is gated", "accept its terms at https://huggingface.co/org/name"),
    (errors.RepositoryNotFoundError, UserError, "no model on the hub", "for a private model `hf auth login`"),
    (errors.RevisionNotFoundError, UserError, "has no revision 'r'", "https://huggingface.co/org/name/tree/main"),
    (errors.LocalEntryNotFoundError, UserError, "the hub does not answer", "check the network"),
    (errors.HFValidationError, UserError, "org/name is no hub id", ""),
    (errors.HfHubHTTPError, RunError, "fetching org/name failed: no", "try again"),
    (OSError, RunError, "fetching org/name failed: no", "HF_HOME chooses the disk"),
    (errors.HfHubHTTPError.__bases__[0], RunError, "fetching org/name failed: no", "try again"),
]


@pytest.mark.parametrize(("error", "raised", "what", "cure"), REFUSALS, ids=lambda it: getattr(it, "__name__", ""))
def test_each_answer_of_the_hub_has_its_message(monkeypatch, error, raised, what, cure):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", raising(error))
    with pytest.raises(raised) as caught:
        fetch_small_files("org/name", "r")
    assert what in caught.value.problems[0].what
    assert cure in caught.value.problems[0].cure


@pytest.mark.parametrize("text", ["gpt2", "Qwen/Qwen3-0.6B", "a/b_c.d"])
def test_hub_ids(text):
    assert is_hub_id(text)


@pytest.mark.parametrize("text", ["", "a/b/c", "./a", "/a", "a/", "~/a", "a b", "a--b", "a..b", "-a", "a\\b", "a" * 97])
def test_no_hub_ids(text):
    assert not is_hub_id(text)


def test_patterns_are_literal():
    assert _literally("a[1]*?.safetensors") == "a[[]1][*][?].safetensors"


def test_of_a_whole_file_no_more_is_read_than_the_range():
    def chunks():
        yield from (b"ab", b"cd")
        raise AssertionError("more was read")

    read = bytearray()
    _take(chunks(), 3, read)
    assert read == b"abcd"
