"""Headers of safetensors files, and how the files of a directory fit together."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from checkpoint_files import bf16, file_bytes, header_of, write_checkpoint, write_index, write_tensors

from hf_ptq.checkpoint.headers import TensorEntry, read_header, some
from hf_ptq.checkpoint.weights import find_weights, read_weights, safe_name

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def entry(dtype="BF16", shape=(2,), begin=0, end=4):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def all_problems(directory: Path) -> str:
    found = find_weights(directory, "asked-for")
    read = read_weights(directory, found)
    return "\n".join(map(str, (*found.problems, *read.problems)))


def test_entries_point_at_the_bytes_of_each_tensor(tmp_path):
    norm = bytes(range(12))
    write_tensors(
        tmp_path / "a.safetensors", {"z": bf16([2, 3], 7), "norm": ("F32", [3], norm), "one": ("U8", [], b"\5")}
    )
    entries, problem = read_header(tmp_path, "a.safetensors")
    start = 8 + struct.unpack("<Q", (tmp_path / "a.safetensors").read_bytes()[:8])[0]
    assert problem is None
    assert entries == [
        TensorEntry("z", "a.safetensors", "BF16", (2, 3), start, 12),
        TensorEntry("norm", "a.safetensors", "F32", (3,), start + 12, 12),
        TensorEntry("one", "a.safetensors", "U8", (), start + 24, 1),
    ]
    data = (tmp_path / "a.safetensors").read_bytes()
    assert data[entries[1].offset : entries[1].offset + entries[1].num_bytes] == norm


def test_agrees_with_the_safetensors_library(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    tensors = {
        "a": torch.arange(6, dtype=torch.int64).reshape(2, 3),
        "b": torch.ones(5, dtype=torch.float8_e4m3fn),
        "c": torch.zeros(3, 0, dtype=torch.float16),
        "d": torch.full((7,), True),
        "e": torch.tensor(2.5, dtype=torch.float64),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    entries, problem = read_header(tmp_path, "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    assert problem is None
    assert {e.name: (e.dtype, e.shape) for e in entries} == {
        "a": ("I64", (2, 3)),
        "b": ("F8_E4M3", (5,)),
        "c": ("F16", (3, 0)),
        "d": ("BOOL", (7,)),
        "e": ("F64", ()),
    }
    for e in entries:
        expected = tensors[e.name].contiguous().flatten().view(torch.uint8).numpy().tobytes()
        assert data[e.offset : e.offset + e.num_bytes] == expected


def test_half_bytes_count_by_elements(tmp_path):
    write_tensors(tmp_path / "x.safetensors", {"packed": ("F4", [2, 6], b"123456")})
    assert read_header(tmp_path, "x.safetensors")[0][0].num_bytes == 6


BROKEN = {
    "empty": (b"", "truncated: 0 bytes"),
    "no length": (b"\1\0\0", "truncated: 3 bytes"),
    "absurd length": (b"\xff" * 100, "promise a header of 18446744073709551615 bytes"),
    "header cut off": (file_bytes({"w": entry()}, b"1234")[:20], "truncated: a header of"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
    "not utf-8": (file_bytes(b"\xff\xfe{}", b""), "not JSON"),
    "not json": (file_bytes(b"{nonsense}", b""), "not JSON"),
    "long number": (file_bytes(b'{"w": ' + b"1" * 5000 + b"}", b""), "not JSON"),
    "no object": (file_bytes([1, 2], b""), "not a JSON object"),
    "no fields": (file_bytes({"w": {"dtype": "BF16"}}, b""), "w has no proper dtype, shape and data_offsets"),
    "no dictionary": (file_bytes({"w": 3}, b""), "w has no proper dtype, shape and data_offsets"),
    "negative": (file_bytes({"w": entry(shape=[-2])}, b"1234"), "w has no proper dtype, shape"),
    "dtype": (file_bytes({"w": entry(dtype="INT3")}, b"1234"), "w has the unknown dtype 'INT3'"),
    "size": (file_bytes({"w": entry(shape=[3])}, b"1234"), "w is BF16 of shape [3], but has 4 bytes"),
    "reversed": (file_bytes({"w": entry(begin=4, end=0)}, b"1234"), "w is BF16 of shape [2], but has -4 bytes"),
    "overlap": (file_bytes({"v": entry(), "w": entry(begin=2, end=6)}, b"123456"), "w overlaps the tensor before it"),
    "same bytes": (file_bytes({"v": entry(), "w": entry()}, b"1234"), "w overlaps the tensor before it"),
    "hole": (file_bytes({"v": entry(), "w": entry(begin=6, end=10)}, b"1234567890"), "2 bytes before w belong to no"),
    "tail": (file_bytes({"w": entry()}, b"1234567"), "3 bytes after its last tensor"),
    "twice": (file_bytes(b'{"w":{"dtype":"U8"},"w":{"dtype":"U8"}}', b""), "its header has w twice"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named_with_what_is_wrong(tmp_path, case):
    content, expected = BROKEN[case]
    (tmp_path / "bad.safetensors").write_bytes(content)
    entries, problem = read_header(tmp_path, "bad.safetensors")
    assert entries == []
    assert str(tmp_path / "bad.safetensors") in str(problem)
    assert expected in str(problem)


@pytest.mark.parametrize("kept", [1, 7, 8, 9, 100, -13, -1])
def test_every_truncation_is_seen(tmp_path, kept):
    whole = file_bytes(header_of({"first": bf16([4]), "last": bf16([6])}), b"\0" * 20)
    (tmp_path / "cut.safetensors").write_bytes(whole[:kept])
    entries, problem = read_header(tmp_path, "cut.safetensors")
    assert not entries
    assert "truncated" in str(problem)


def test_a_truncated_file_names_the_tensors_that_are_lost(tmp_path):
    whole = file_bytes(header_of({"first": bf16([4]), "last": bf16([6])}), b"\0" * 20)
    (tmp_path / "cut.safetensors").write_bytes(whole[:-1])
    problem = read_header(tmp_path, "cut.safetensors")[1]
    assert f"has {len(whole) - 1} of {len(whole)} bytes, incomplete: last" in str(problem)


def test_a_missing_file_is_named(tmp_path):
    assert "none.safetensors: cannot be read (No such file" in str(read_header(tmp_path, "none.safetensors")[1])


def test_with_an_index_only_its_files_are_read_and_the_others_are_named(tmp_path):
    write_checkpoint(tmp_path)
    write_tensors(tmp_path / "extra.safetensors", {"embed": bf16([1])})
    write_tensors(tmp_path / "consolidated.safetensors", {"embed": bf16([1])})
    found = find_weights(tmp_path, "m")
    read = read_weights(tmp_path, found)
    assert found.files == (FIRST, SECOND)
    assert list(read.tensors) == ["embed", "norm", "head"]
    assert not found.problems + read.problems
    assert found.notes == ("not read, since model.safetensors.index.json decides: extra.safetensors",)


def test_without_an_index_model_safetensors_is_the_checkpoint(tmp_path):
    write_tensors(tmp_path / "model.safetensors", {"w": bf16([1])})
    write_tensors(tmp_path / "model.fp32.safetensors", {"w": bf16([2])})
    found = find_weights(tmp_path, "m")
    assert found.files == ("model.safetensors",)
    assert "model.fp32.safetensors" in found.notes[0]


def test_without_both_all_files_at_the_top_are_the_checkpoint(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.safetensors", "a.safetensors", "consolidated.00.safetensors", "sub/c.safetensors"):
        write_tensors(tmp_path / name, {name: bf16([1])})
    found = find_weights(tmp_path, "m")
    assert found.files == ("a.safetensors", "b.safetensors")
    assert list(read_weights(tmp_path, found).tensors) == ["a.safetensors", "b.safetensors"]


def test_missing_files_are_named(tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / SECOND).unlink()
    assert f"1 of the 2 files it names are missing: {SECOND}\n    -> complete the download" in all_problems(tmp_path)


UNSAFE = (
    "../x.safetensors",
    "/etc/x.safetensors",
    "a/../../x.safetensors",
    "C:/x.safetensors",
    "..\\x.safetensors",
    "",
)


@pytest.mark.parametrize("name", UNSAFE)
def test_a_file_name_cannot_leave_the_directory(tmp_path, name):
    directory = tmp_path / "model"
    write_checkpoint(directory)
    write_tensors(tmp_path / "x.safetensors", {"embed": bf16([1])})
    write_index(directory, {"embed": name, "head": SECOND})
    assert not safe_name(name)
    assert f"names files outside its directory: {name!r}" in all_problems(directory)
    assert name not in find_weights(directory, "m").files


def test_a_file_in_a_folder_below_is_fine(tmp_path):
    (tmp_path / "part").mkdir()
    write_tensors(tmp_path / "part" / "a.safetensors", {"w": bf16([1])})
    write_index(tmp_path, {"w": "part/a.safetensors"})
    assert all_problems(tmp_path) == ""


def test_symbolic_links_to_blobs_are_fine(tmp_path):
    directory, blobs = write_checkpoint(tmp_path / "snapshots" / "c"), tmp_path / "blobs"
    blobs.mkdir()
    for path in list(directory.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(Path("../../blobs") / path.name)
    assert all_problems(directory) == ""
    (blobs / FIRST).unlink()
    assert f"missing: {FIRST}" in all_problems(directory)


def test_an_index_that_names_pickles_is_refused(tmp_path):
    write_checkpoint(tmp_path)
    write_index(tmp_path, {"embed": "pytorch_model.bin"})
    assert "names files that are not safetensors: pytorch_model.bin" in all_problems(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"w": 3}}', '{"weight_map": ["w"]}'])
def test_a_broken_index_is_named(tmp_path, text):
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert f"{tmp_path / 'model.safetensors.index.json'}: " in all_problems(tmp_path)


def test_tensors_that_are_not_where_the_index_says_are_named(tmp_path):
    write_checkpoint(tmp_path)
    write_index(tmp_path, {"embed": SECOND, "norm": FIRST, "head": SECOND, "lost": FIRST})
    problems = all_problems(tmp_path)
    assert f"2 tensors are not in the file it names for them: embed in {SECOND}, lost in {FIRST}" in problems


def test_a_tensor_in_two_files_is_refused_with_both_names(tmp_path):
    write_checkpoint(tmp_path)
    write_tensors(tmp_path / SECOND, {"head": bf16([2, 4]), "norm": bf16([3])})
    assert f"{FIRST} and {SECOND} both hold norm" in all_problems(tmp_path)


def test_tensors_that_the_index_does_not_list_are_read_and_named(tmp_path):
    write_checkpoint(tmp_path)
    write_index(tmp_path, {"embed": FIRST, "head": SECOND})
    read = read_weights(tmp_path, find_weights(tmp_path, "m"))
    assert "norm" in read.tensors
    assert read.notes == (
        "1 tensors of the weight files are not in model.safetensors.index.json; they are read too: norm",
    )


def test_all_problems_come_at_once(tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / FIRST).write_bytes((tmp_path / FIRST).read_bytes()[:-1])
    write_index(tmp_path, {"embed": FIRST, "head": SECOND, "gone": "gone.safetensors", "lost": SECOND})
    problems = all_problems(tmp_path)
    for expected in (f"{FIRST}: truncated", "missing: gone.safetensors", f"lost in {SECOND}"):
        assert expected in problems


def test_files_without_tensors_are_refused(tmp_path):
    write_tensors(tmp_path / "model.safetensors", {})
    assert "no tensor in model.safetensors" in all_problems(tmp_path)


def test_long_lists_are_cut():
    assert some(range(3)) == "0, 1, 2"
    assert some(range(9), limit=2) == "0, 1 and 7 more"


def test_header_may_be_padded(tmp_path):
    header = json.dumps(header_of({"w": bf16([2])})).encode() + b"   "
    (tmp_path / "x.safetensors").write_bytes(file_bytes(header, b"1234"))
    assert read_header(tmp_path, "x.safetensors")[1] is None
