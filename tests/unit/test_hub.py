"""Hub ids: a hub made of a local server, a cache made by hand, and every way the hub can say no."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from checkpoint_files import LLAMA, write_checkpoint
from huggingface_hub import constants, errors
from local_hub import COMMIT, REPO, Hub, environment, files_of, use
from rich.console import Console

from hf_ptq.checkpoint import hub as hub_module
from hf_ptq.checkpoint.hub import _literally, _take, fetch_small_files, is_hub_id
from hf_ptq.checkpoint.source import download, open_source
from hf_ptq.errors import RunError, UserError
from hf_ptq.report import Report

FIRST = "model-00001-of-00002.safetensors"
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
        f"if h := fetch_headers({repo!r}, c, d).beginnings: fetch_weights({repo!r}, c, d, h)\n"
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
def checkpoint(tmp_path) -> dict[str, bytes]:
    """The files of a repository: two shards with an index."""
    return files_of(write_checkpoint(tmp_path / "checkpoint"))


@pytest.fixture
def serve(tmp_path, hub, monkeypatch):
    """A hub that has these files, which this process asks."""

    def start(files: dict[str, bytes]) -> Hub:
        server = hub(files)
        use(server, tmp_path / "hub", monkeypatch)
        return server

    return start


def fill(server: Hub, weights: bool = True) -> Path:
    """Fill the cache as a run does; its directory of the commit.

    huggingface_hub leaves what it knows of the repository's files there, too.
    """
    source = open_source(REPO, None, False, silent())
    if weights:
        download(source)
    assert (source.directory.parents[1] / "trees" / f"{COMMIT}.json").is_file()
    server.asked.clear()
    return source.directory


@pytest.fixture(params=["HF_HUB_OFFLINE", "no answer"])
def disconnect(request, monkeypatch):
    """Both ways to be without a hub; the parameter is what messages call it."""

    def cut(server: Hub) -> str:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", request.param == "HF_HUB_OFFLINE")
        server.stop()
        monkeypatch.setattr(time, "sleep", lambda _: None)  # huggingface_hub asks again for 23 seconds
        return "HF_HUB_OFFLINE is set" if request.param == "HF_HUB_OFFLINE" else "the hub does not answer"

    return cut


def silent() -> Report:
    return Report(Console(quiet=True), verbose=False)


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_full_cache_needs_no_hub(revision, checkpoint, serve, disconnect):
    server = serve(checkpoint)
    directory = fill(server)
    disconnect(server)
    source = open_source(REPO, revision, False, silent())
    assert source.directory == directory
    assert source.commit == COMMIT
    assert source.origin == REPO
    assert list(source.tensors) == ["embed", "norm", "head"]
    assert source.elsewhere == {}


OTHERS = ["consolidated.safetensors", "onnx/a.safetensors", "below/b.safetensors"]


@pytest.mark.parametrize("other", OTHERS)
def test_a_full_cache_without_an_index_needs_no_hub_whatever_else_it_has(other, checkpoint, serve, disconnect):
    del checkpoint["model.safetensors.index.json"]
    server = serve(checkpoint | {other: b"x" * 50})
    fill(server)
    assert other not in server.fetched
    open_source(REPO, None, False, silent())
    assert other not in server.asked
    disconnect(server)
    source = open_source(REPO, None, False, silent())
    assert list(source.tensors) == ["embed", "norm", "head"]


def test_of_a_full_cache_the_hub_is_asked_for_no_weights(checkpoint, serve, monkeypatch):
    server = serve(checkpoint)
    fill(server)
    monkeypatch.setattr(hub_module, "_list_weights", lambda *_: pytest.fail("the hub is asked which weights it has"))
    open_source(REPO, None, False, silent())
    assert [name for name in server.asked if name.endswith(".safetensors")] == []


@pytest.mark.parametrize(("repo", "revision"), [("org/name", "other"), ("org/name", "f" * 40), ("org/absent", None)])
def test_offline_and_not_cached_says_what_to_do(repo, revision, checkpoint, serve, tmp_path, monkeypatch):
    fill(serve(checkpoint))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set") as caught:
        fetch_small_files(repo, revision)
    assert f"run once without HF_HUB_OFFLINE, or `hf download {repo}`" in str(caught.value)
    assert str(tmp_path / "hub") in str(caught.value)


def test_without_a_hub_a_missing_shard_is_named(checkpoint, serve, disconnect):
    server = serve(checkpoint)
    directory = fill(server)
    second = directory / "model-00002-of-00002.safetensors"
    second.resolve().unlink()
    second.unlink()
    why = disconnect(server)
    with pytest.raises(UserError) as caught:
        open_source(REPO, None, False, silent())
    (problem,) = caught.value.problems
    assert problem.what.endswith("1 of the 2 files it names are missing: model-00002-of-00002.safetensors")
    assert problem.cure.startswith(why)
    assert "or give a directory" in problem.cure


def test_without_a_hub_every_missing_file_is_named_beside_other_problems(checkpoint, serve, disconnect):
    checkpoint["config.json"] = json.dumps(LLAMA | {"model_type": "nobody"}).encode()
    server = serve(checkpoint)
    with pytest.raises(UserError, match="'nobody'"):
        fill(server)
    why = disconnect(server)
    with pytest.raises(UserError) as caught:
        open_source(REPO, None, False, silent())
    missing, unknown = caught.value.problems
    assert missing.what.endswith(
        "2 of the 2 files it names are missing: model-00001-of-00002.safetensors, model-00002-of-00002.safetensors"
    )
    assert missing.cure.startswith(why)
    assert "'nobody'" in unknown.what


def test_without_a_hub_and_without_an_index_the_missing_weights_are_told(checkpoint, serve, disconnect):
    files = {"config.json": checkpoint["config.json"], "model.safetensors": checkpoint[FIRST]}
    server = serve(files)
    directory = fill(server, weights=False)
    why = disconnect(server)
    with pytest.raises(UserError) as caught:
        open_source(REPO, None, False, silent())
    (problem,) = caught.value.problems
    assert problem.what == f"{directory} has no weights: neither model.safetensors.index.json nor *.safetensors"
    assert problem.cure.startswith(why)


def test_files_that_the_hub_does_not_have_are_not_to_be_downloaded_again(checkpoint, serve):
    del checkpoint[FIRST]
    server = serve(checkpoint)
    with pytest.raises(UserError) as caught:
        fill(server)
    (problem,) = caught.value.problems
    assert problem.what.endswith(f"1 of the 2 files it names are missing: {FIRST}")
    assert problem.cure == f"{REPO} does not have them: take another --revision, or tell its owners"


def test_a_pointer_on_the_hub_is_cured_there(checkpoint, serve):
    checkpoint[FIRST] = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    server = serve(checkpoint)
    with pytest.raises(UserError) as caught:
        fill(server)
    (problem,) = caught.value.problems
    assert problem.what == f"{FIRST} of {REPO} on the hub: is a Git LFS pointer, not the weights"
    assert problem.cure == "take another --revision, or tell the repository's owners"


@pytest.mark.parametrize("files", [("x.bin",), (FIRST, "x.bin")], ids=len)
def test_nothing_is_asked_about_a_file_of_an_index_that_is_no_safetensors(files, checkpoint, serve):
    checkpoint["x.bin"] = b"pickled"
    checkpoint["model.safetensors.index.json"] = index(*files)
    server = serve(checkpoint)
    with pytest.raises(UserError, match=r"names files that are not safetensors: x\.bin"):
        fill(server)
    assert server.asked.count("x.bin") == 0
    assert {name for name, *_ in server.ranges} == set(files) - {"x.bin"}


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
