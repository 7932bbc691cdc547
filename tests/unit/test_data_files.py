"""Local files and records in, documents out: every kind of file, right and wrong."""

from __future__ import annotations

import csv
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file

from hf_ptq.data.local_files import list_files, local_documents
from hf_ptq.data.records import FIELDS, RECORD_SCHEMA, Chat, Text, TokenRow, read_record
from hf_ptq.errors import Problem


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def texts(path: Path) -> list[str]:
    """The texts of a path; a problem in it fails the test with its message."""
    documents = list(local_documents(path))
    assert all(isinstance(document, Text) for document in documents), documents
    return [document.text for document in documents if isinstance(document, Text)]


def problems(path: Path) -> list[str]:
    return [str(found) for found in local_documents(path) if isinstance(found, Problem)]


# Records


@pytest.mark.parametrize(
    ("record", "document"),
    [
        ({"text": "hello"}, Text("hello", "here")),
        ({"text": ""}, Text("", "here")),
        ({"text": "a", "prompt": "b", "completion": "c"}, Text("a", "here")),
        ({"text": None, "prompt": "b ", "completion": "c"}, Text("b c", "here")),
        ({"prompt": "b", "completion": " c"}, Text("b c", "here")),
        ({"prompt": "b", "completion": "c"}, Text("b\nc", "here")),
        ({"input_ids": [3, 4], "text": "x"}, TokenRow((3, 4), "here")),
        ({"input_ids": [0, 3, 4], "attention_mask": [0, 1, 1]}, TokenRow((3, 4), "here", padding=1)),
    ],
)
def test_a_record_becomes_a_document(record, document):
    assert read_record(record, "here") == document


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}], "text": "no"},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
        {"messages": None, "conversations": [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": "Ho"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "H"}, {"text": "i"}]},
                {"role": "assistant", "content": "Ho", "tool_calls": None},
            ]
        },
        {"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "Ho"}]},
    ],
)
def test_every_spelling_of_a_chat_is_the_same_chat(record):
    expected = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"})
    assert read_record(record, "here") == Chat(expected, "here")


def test_tool_calls_and_tools_are_kept_for_the_template():
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    record = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}], "tools": [{"name": "f"}]}
    assert read_record(record, "here") == Chat(
        ({"role": "assistant", "content": "", "tool_calls": [call]},), "here", tools=({"name": "f"},)
    )


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ([1, 2], "list"),
        ("text", "str"),
        (None, "null"),
        ({}, "found: none"),
        ({"body": "x", "id": 3}, "found: body, id"),
        ({"text": 5}, "`text` is a string, not int"),
        ({"text": "a\ud800"}, "`text` holds half a surrogate pair at character 1"),
        ({"prompt": "x"}, "`prompt` has no `completion`"),
        ({"prompt": "x", "completion": ["y"]}, "`completion` is a string, not list"),
        ({"messages": "hi"}, "`messages` is a list of messages, not str"),
        ({"messages": []}, "`messages` is empty"),
        ({"messages": ["hi"]}, "`messages`, message 1 is an object with role and content, not str"),
        ({"messages": [{"content": "x"}]}, "`messages`, message 1 has no role (found: content)"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "user"}]}, "2: the content is a string, not null"),
        ({"messages": [{"role": 3, "content": "x"}]}, "the role is a string, not int"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part of type 'image'"),
        ({"conversations": [{"from": "robot", "value": "x"}]}, "message 1 is from 'robot'; known are human"),
        ({"conversations": [{"from": "gpt", "value": 1.5}]}, "the content is a string, not float"),
        ({"input_ids": "1 2"}, "`input_ids` is a list of integers, not str"),
        ({"input_ids": [1, 2.0]}, "not float (position 1)"),
        ({"input_ids": [True]}, "not bool (position 0)"),
        ({"input_ids": [1, [2]]}, "not list (position 1)"),
        ({"input_ids": []}, "`input_ids` is empty"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "`attention_mask` is a list of 2 zeros and ones"),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, "`attention_mask` hides every token"),
    ],
)
def test_a_malformed_record_is_named(record, says):
    problem = read_record(record, "FILE, line 3")
    assert isinstance(problem, Problem)
    assert problem.what.startswith("FILE, line 3: ")
    assert says in problem.what


def test_the_schema_names_every_field_and_kind():
    for word in (*FIELDS, "completion", ".jsonl", ".json", ".csv", ".parquet", ".txt", ".safetensors"):
        assert word in RECORD_SCHEMA


# Files


def test_jsonl(tmp_path):
    lines = b'\xef\xbb\xbf{"text": "one"}\n\n{"text": "two\xe2\x80\xa8lines"}\r\n{"text": "three"}'
    file = write(tmp_path / "a.jsonl", lines)
    assert texts(file) == ["one", "two\u2028lines", "three"]


def test_malformed_lines_of_jsonl_are_all_named(tmp_path):
    lines = [b'{"text": "good"}', b'{"text": "cut', b'{"text": 7}', b"\xff\xfe", b"[" * 100_000, b'{"text": "good"}']
    file = write(tmp_path / "a.jsonl", b"\n".join(lines))
    found = problems(file)
    assert [text.split(":")[0] for text in found] == [f"{file}, line {n}" for n in (2, 3, 4, 5)]
    assert "not JSON (Unterminated string" in found[0]
    assert "`text` is a string, not int" in found[1]
    assert "not UTF-8 (byte 0xff)" in found[2]
    assert "not JSON" in found[3]
    assert sum(isinstance(document, Text) for document in local_documents(file)) == 2


@pytest.mark.parametrize(
    "content",
    [
        '[{"text": "one"}, {"text": "two"}]',
        '\n[\n  {\n    "text": "one"\n  },\n  {"text": "two"}\n]\n',
        '{"text": "one"}\n{"text": "two"}\n',
    ],
)
def test_json_in_every_layout(tmp_path, content):
    assert texts(write(tmp_path / "a.json", content)) == ["one", "two"]


def test_json_of_one_record_or_none(tmp_path):
    assert texts(write(tmp_path / "one.json", '{\n "text": "one"\n}')) == ["one"]
    assert texts(write(tmp_path / "none.json", "[]")) == []


@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        ('[\n{"text": "a"},\n{"text": 1},\n{"text": "b"}]', 3, "`text` is a string, not int"),
        ('[\n{"text": "a"},\n\n{"text" "b"}]', 4, "not JSON (Expecting ':'"),
        ('[{"text": "a"}\n{"text": "b"}]', 2, "not JSON (Expecting ',' or ']'"),
        ('[{"text": "a"},\n', 2, "not JSON (Expecting value"),
        ('{\n"text": "a"\n"id": 1}', 3, "not JSON (Expecting ','"),
        ('{"text": "a"}\n{"text": 3}', 2, "`text` is a string, not int"),
        ('\n\n{\n"body": "a"}', 3, "found: body"),
        ("3", 1, "int"),
        (b'[{"text": "a"},\n{"text": "\xff"}]', 2, "not UTF-8 (byte 0xff)"),
    ],
)
def test_a_malformed_json_file_is_named_with_its_line(tmp_path, content, line, says):
    file = write(tmp_path / "a.json", content)
    found = problems(file)
    assert len(found) == 1
    assert found[0].startswith(f"{file}, line {line}: ")
    assert says in found[0]


def test_txt_is_one_document(tmp_path):
    assert texts(write(tmp_path / "a.txt", "one\n\ntwo\n")) == ["one\n\ntwo\n"]
    assert problems(write(tmp_path / "b.txt", b"one\ntwo\nth\xffee")) == [
        str(Problem(f"{tmp_path / 'b.txt'}, line 3: not UTF-8 (byte 0xff)", "convert the file to UTF-8"))
    ]


def test_csv_with_long_cells_and_lines_in_cells(tmp_path):
    limit = csv.field_size_limit()
    long = "word " * 100_000
    file = write(tmp_path / "a.csv", f'\ufeffid,text\r\n1,"one\nmore, ""quoted"""\r\n\r\n2,{long}\r\n3,\r\n')
    assert texts(file) == ['one\nmore, "quoted"', long, ""]
    assert csv.field_size_limit() == limit
    assert texts(write(tmp_path / "b.csv", "prompt,completion\nWhat?,That.\n")) == ["What?\nThat."]


@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        ('text,id\n"a\nb",1\nc,2,3\nd,4', 4, "3 cells in a table of 2 columns"),
        ("text,id\na,1\nb", 3, "1 cells in a table of 2 columns"),
        ("body,id\na,1\n", 1, "found: body, id"),
        ('text\na\n"b" c\n', 3, "not CSV"),
        ("input_ids\n1 2 3\n", 2, "`input_ids` is a list of integers, not str"),
    ],
)
def test_a_malformed_csv_file_is_named_with_its_line(tmp_path, content, line, says):
    file = write(tmp_path / "a.csv", content)
    found = problems(file)
    assert len(found) == 1
    assert found[0].startswith(f"{file}, line {line}")
    assert says in found[0]


def test_parquet_with_nulls_first(tmp_path):
    rows = {"text": [None] * 300 + ["one"], "prompt": ["a"] * 301, "completion": ["b"] * 301, "more": list(range(301))}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == ["a\nb"] * 300 + ["one"]


def test_parquet_with_chats_and_ids(tmp_path):
    table = pyarrow.Table.from_pylist(
        [
            {"messages": [{"role": "user", "content": "Hi", "name": None}], "input_ids": None},
            {"messages": None, "input_ids": [5, 6]},
        ]
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    where = f"{tmp_path / 'a.parquet'}, row"
    assert list(local_documents(tmp_path / "a.parquet")) == [
        Chat(({"role": "user", "content": "Hi"},), f"{where} 1"),
        TokenRow((5, 6), f"{where} 2"),
    ]


def test_malformed_parquet(tmp_path):
    file = write(tmp_path / "a.parquet", b"PAR1 no more than this PAR1")
    assert problems(file)[0].startswith(f"{file}: not a parquet file")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), file)
    assert "found: body" in problems(file)[0]
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(["x", None])}), file)
    assert problems(file)[0].startswith(f"{file}, row 2: no field that can be used")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_safetensors_rows(tmp_path, dtype):
    save_file({"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=dtype)}, tmp_path / "a.safetensors")
    rows = list(local_documents(tmp_path / "a.safetensors"))
    assert rows == [
        TokenRow((1, 2, 3), f"{tmp_path / 'a.safetensors'}, row 1"),
        TokenRow((4, 5, 6), f"{tmp_path / 'a.safetensors'}, row 2"),
    ]


def test_safetensors_attention_mask_hides_padding(tmp_path):
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    save_file({"input_ids": torch.tensor([[1, 2, 0], [4, 5, 6]]), "attention_mask": mask}, tmp_path / "a.safetensors")
    assert [(row.ids, row.padding) for row in local_documents(tmp_path / "a.safetensors")] == [  # pyright: ignore
        ((1, 2), 1),
        ((4, 5, 6), 0),
    ]


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"ids": torch.ones(2, 2, dtype=torch.int64)}, "no tensor `input_ids` (found: ids)"),
        ({"input_ids": torch.ones(2, 2)}, "`input_ids` is float32 [2, 2]; it must be int64 or int32"),
        ({"input_ids": torch.ones(2, 2, 2, dtype=torch.int64)}, "int64 [2, 2, 2]"),
        ({"input_ids": torch.ones(2, 0, dtype=torch.int64)}, "row 1: `input_ids` is empty"),
        (
            {"input_ids": torch.ones(2, 2, dtype=torch.int64), "attention_mask": torch.ones(2, dtype=torch.int64)},
            "`attention_mask` is [2] and `input_ids` [2, 2]",
        ),
    ],
)
def test_malformed_safetensors(tmp_path, tensors, says):
    save_file(tensors, tmp_path / "a.safetensors")
    found = problems(tmp_path / "a.safetensors")
    assert str(tmp_path / "a.safetensors") in found[0]
    assert says in found[0]


def test_truncated_safetensors(tmp_path):
    save_file({"input_ids": torch.ones(2, 2, dtype=torch.int64)}, tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes()
    file = write(tmp_path / "a.safetensors", data[:-8])
    assert problems(file)[0].startswith(f"{file}: not a safetensors file that can be read")


def test_a_folder_is_all_its_files_sorted(tmp_path):
    write(tmp_path / "b.txt", "2")
    write(tmp_path / "a.jsonl", '{"text": "1"}')
    write(tmp_path / "c" / "d.JSON", '[{"text": "3"}]')
    write(tmp_path / ".cache" / "x.txt", "hidden")
    write(tmp_path / "notes.md", "not data")
    assert texts(tmp_path) == ["1", "2", "3"]
    assert [file.name for file in list_files(tmp_path)] == ["a.jsonl", "b.txt", "d.JSON"]
