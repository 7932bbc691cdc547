"""Data sets by name: the registry, what is refused cheaply, sizes and defaults, and how hub records are read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from hf_ptq.data import datasets as named
from hf_ptq.data.datasets import (
    DATASETS,
    check_datasets_cheaply,
    choose_datasets,
    default_datasets,
    open_documents,
    resolve_sizes,
)
from hf_ptq.data.records import Chat, Text
from hf_ptq.errors import Problem, UserError


def write(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


# Names and sizes


def test_the_registry_needs_neither_torch_nor_datasets(tmp_path):
    code = (
        "import sys, hf_ptq.data.datasets as d; d.check_datasets_cheaply(['c4', 'nosuch', *sys.argv], [1]);"
        "bad = {'torch', 'datasets', 'transformers', 'pyarrow', 'safetensors', 'numpy'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    file = write(tmp_path / "a.parquet", "x")
    command = [sys.executable, "-c", code, str(file), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_registry_reads_as_a_list():
    for name in ("pydoc", "cnn_dailymail", "nemotron-post-training-dataset-v2", "c4", "wikitext", "pile", "gsm8k"):
        assert "\n" not in DATASETS[name].description
    with pytest.raises(AttributeError):
        DATASETS["c4"].path = "elsewhere"  # type: ignore[misc]


def test_known_names_and_files_pass(tmp_path):
    file = write(tmp_path / "a.jsonl", "{}")
    assert check_datasets_cheaply(["c4", str(file), str(tmp_path), "pydoc"], [4]) == []
    assert check_datasets_cheaply([], [1]) == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("wikitxt", "did you mean wikitext"),
        ("cnn-dailymail", "did you mean cnn_dailymail"),
        ("nemotron-post-training-dataset", "nemotron-post-training-dataset-v2"),
        ("zzz", "known: pydoc, cnn_dailymail"),
        ("", "no data set or file of that name"),
        ("calib.jsonl", "no such file or folder"),
        ("data/calib", "no such file or folder"),
    ],
)
def test_an_unknown_name_gets_the_nearest(name, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (problem,) = check_datasets_cheaply([name], [])
    assert f"--dataset {name}" in problem.what
    assert says in str(problem)


def test_files_that_cannot_be_data(tmp_path):
    (tmp_path / "empty_folder").mkdir()
    markdown, empty = write(tmp_path / "a.md", "x"), write(tmp_path / "a.jsonl", "")
    found = check_datasets_cheaply([str(tmp_path / "empty_folder"), str(markdown), str(empty)], [])
    assert [problem.what.removeprefix(f"--dataset {tmp_path}/") for problem in found] == [
        "empty_folder: the folder holds no data file",
        "a.md: files of kind '.md' cannot be read",
        "a.jsonl: the file is empty",
    ]
    assert ".safetensors" in found[1].cure


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission(tmp_path):
    file = write(tmp_path / "a.txt", "x")
    file.chmod(0)
    assert "may not be read" in check_datasets_cheaply([str(file)], [])[0].what


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((), (171, 171, 170)), ((512,), (171, 171, 170)), ((7,), (3, 2, 2)), ((3,), (1, 1, 1)), ((5, 6, 7), (5, 6, 7))],
)
def test_sizes_are_split_or_taken_as_listed(sizes, expected):
    assert resolve_sizes(["a", "b", "c"], sizes) == expected
    assert resolve_sizes(["a"], (9,)) == (9,)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((1, 2), ["--calib_size 1,2 has 2 numbers", "--dataset c4,pydoc,pile has 3 names"]),
        ((2,), ["--calib_size 2 is less than the 3 data sets"]),
        ((0,), ["--calib_size 0: every size must be at least 1"]),
        ((1, -2, 3), ["--calib_size 1,-2,3: every size must be at least 1"]),
    ],
)
def test_sizes_that_do_not_fit(sizes, says):
    (problem,) = check_datasets_cheaply(["c4", "pydoc", "pile"], sizes)
    with pytest.raises(UserError) as error:
        resolve_sizes(["c4", "pydoc", "pile"], sizes)
    for text in says:
        assert text in problem.what
        assert text in str(error.value)


def test_defaults_depend_on_the_model():
    default = ("cnn_dailymail", "nemotron-post-training-dataset-v2")
    assert default_datasets("some/model") == (default, (256, 256))
    assert default_datasets("demo") == (("pydoc",), (8,))
    assert choose_datasets("some/model", (), ()) == (default, ())
    assert choose_datasets("some/model", ("c4",), (9,)) == (("c4",), (9,))
    assert choose_datasets("demo", (), ()) == (("pydoc",), (8,))
    assert choose_datasets("demo", (), (16,)) == (("pydoc",), (16,))
    assert choose_datasets("demo", ("c4",), ()) == (("c4",), (8,))


# Data sets by name

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
HUB = {
    "cnn_dailymail": {"article": "News.", "highlights": "N.", "id": "1"},
    "c4": {"text": "Page.", "url": "u"},
    "pile": {"text": "Pile.", "meta": {}},
    "pile-10k": {"text": "Pile.", "meta": {}},
    "wikitext": {"text": " = Title = \n"},
    "wikitext2": {"text": " = Title = \n"},
    "gsm8k": {"question": "1+1?", "answer": "2"},
    "openorca": {"id": "1", "system_prompt": "", "question": "Hi", "response": "Ho"},
    "ultrachat": {"prompt": "Hi", "messages": TURNS},
    "magpie": {"conversations": SHAREGPT, "instruction": "Hi"},
    "nemotron-post-training-dataset-v1": {"messages": [{**turn, "tool_calls": []} for turn in TURNS], "metadata": "{}"},
    "nemotron-post-training-dataset-v2": {"messages": TURNS, "reasoning": "off"},
}


@pytest.mark.parametrize("name", [name for name in DATASETS if name != "pydoc"])
def test_the_records_of_each_hub_data_set_are_understood(name, monkeypatch):
    monkeypatch.setattr(named, "load_stream", lambda path, configuration, split: [HUB[name]])
    expected = {"cnn_dailymail": "News.", "c4": "Page.", "gsm8k": "1+1?\n2"}
    document = next(open_documents(name))
    if isinstance(document, Chat):
        assert document.messages == tuple(TURNS)
    else:
        assert isinstance(document, Text)
        assert document.text == expected.get(name, HUB[name].get("text"))
    assert document.where.startswith(name)
    assert document.where.endswith("record 1")


def test_a_hub_data_set_is_asked_for_as_the_hub_has_it(monkeypatch):
    asked = []
    monkeypatch.setattr(named, "load_stream", lambda *arguments: asked.append(arguments) or [])
    assert list(open_documents("cnn_dailymail")) == []
    assert list(open_documents("nemotron-post-training-dataset-v2")) == []
    assert asked == [
        ("abisee/cnn_dailymail", "3.0.0", "train"),
        *(("nvidia/Nemotron-Post-Training-Dataset-v2", None, split) for split in ("stem", "chat", "math", "code")),
    ]


def test_streaming_is_asked_of_the_library(monkeypatch):
    import datasets

    calls = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: calls.append((args, kwargs)) or ["stream"])
    assert named.load_stream("allenai/c4", "en", "train") == ["stream"]
    assert calls == [(("allenai/c4", "en"), {"split": "train", "streaming": True})]


def test_splits_take_turns(monkeypatch):
    lengths = {"stem": 1, "chat": 3, "math": 0, "code": 2}

    def stream(path, configuration, split):
        return [{"messages": [{"role": "user", "content": f"{split}{i}"}]} for i in range(lengths[split])]

    monkeypatch.setattr(named, "load_stream", stream)
    found = [document.messages[0]["content"] for document in open_documents("nemotron-post-training-dataset-v2")]  # pyright: ignore
    assert found == ["stem0", "chat0", "code0", "chat1", "code1", "chat2"]


def test_wikitext_lines_become_articles(monkeypatch):
    lines = ["", " = One = \n", "", " a \n", " = = Part = = \n", " b \n", " = Two = \n", " c \n"]
    monkeypatch.setattr(named, "load_stream", lambda *_: [{"text": line} for line in lines])
    found = [document.text for document in open_documents("wikitext")]  # pyright: ignore
    assert found == [" = One = \n a \n = = Part = = \n b \n", " = Two = \n c \n"]


def test_openorca_keeps_a_system_prompt_that_is_there(monkeypatch):
    monkeypatch.setattr(named, "load_stream", lambda *_: [{**HUB["openorca"], "system_prompt": "Be kind."}])
    (document,) = open_documents("openorca")
    assert isinstance(document, Chat)
    assert document.messages[0] == {"role": "system", "content": "Be kind."}


def test_a_hub_record_without_its_field_is_a_problem_not_a_crash(monkeypatch):
    records = [{}, {"messages": None}, {"messages": [None]}, {"messages": [{"role": "user"}]}]
    monkeypatch.setattr(named, "load_stream", lambda *_: iter(records))
    found = list(open_documents("ultrachat"))
    assert len(found) == 4
    assert all(isinstance(document, Problem) for document in found)


def _gated():
    from datasets.exceptions import DatasetNotFoundError

    return DatasetNotFoundError("Dataset 'nvidia/X' is a gated dataset on the Hub.\nmore")


@pytest.mark.parametrize("error", [_gated, lambda: ConnectionError("Couldn't reach"), lambda: ValueError("no cache")])
@pytest.mark.parametrize("late", [False, True])
def test_a_hub_data_set_that_cannot_be_read(monkeypatch, error, late):
    def broken(*_):
        if not late:
            raise error()

        def stream():
            yield {"text": "first"}
            raise error()

        return stream()

    monkeypatch.setattr(named, "load_stream", broken)
    with pytest.raises(UserError) as caught:
        list(open_documents("c4"))
    message = str(caught.value)
    reason = str(error()).splitlines()[0]
    for part in ("--dataset c4", "allenai/c4", reason, "HF_TOKEN", "HF_HUB_OFFLINE", "`--dataset pydoc`", "local file"):
        assert part in message
    assert "more" not in message.partition("->")[0]


def test_offline_is_refused_with_the_cure(tmp_path):
    code = (
        "from hf_ptq.data.datasets import open_documents\nfrom hf_ptq.errors import UserError\n"
        "try: open_documents('cnn_dailymail')\nexcept UserError as error: print(error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert "--dataset cnn_dailymail: abisee/cnn_dailymail cannot be read" in result.stdout
    assert "HF_HUB_OFFLINE" in result.stdout


def test_pydoc_is_pythons_documentation_in_order():
    documents = list(open_documents("pydoc"))
    assert [document.text for document in documents] == [topics[key] for key in sorted(topics)]  # pyright: ignore


def test_a_local_file_by_its_path(tmp_path):
    file = write(tmp_path / "a.jsonl", json.dumps({"text": "mine"}))
    assert list(open_documents(str(file))) == [Text("mine", f"{file}, line 1")]
