"""Which files of a source are copied beside the weights, and what is refused on the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rich.console import Console

from hf_ptq.checkpoint.source import Source
from hf_ptq.errors import RunError
from hf_ptq.export.sidecars import copy_sidecars, list_sidecars
from hf_ptq.report import Report

SIDECARS = {
    "tokenizer.json": b'{"a": "\xc3\xbc"}\r\n', "tokenizer.model": bytes(range(256)), "README.md": b"",
    "template.jinja": b"{{ x }}", "generation_config.json": b'{"do_sample": false, "temperature": 0.7}',
    "preprocessor_config.json": b"{}", "added_tokens.json": b"{}", "index.json": b"{}", "modeling_x.py": b"import os\n",
    "onnx_export.py": b"#", "sub/config.json": b'{"inner": 1}', "sub/deeper/code.py": b"x",
    "my_original/notes.txt": b"y", "tokenizer/original/vocab.txt": b"z",
}  # fmt: skip
OTHERS = (
    "config.json", "hf_quant_config.json", "hf_ptq_report.json", "quantize_config.json", "quantization_config.json",
    "recipe.yaml", "model.safetensors.index.json", "model.safetensors.index.fp16.json", "pytorch_model.bin.index.json",
    "model-00001-of-00002.safetensors", "pytorch_model.bin", "x.pt", "x.pth", "x.gguf", "x.onnx",
    "onnx/model.onnx_data", "tf_model.h5", "flax_model.msgpack", "consolidated.00.pth", "consolidated.safetensors",
    "consolidated_params.json", "original/tokenizer.model", "original/sub/params.json", ".git/config",
    ".cache/huggingface/x.json", ".env", "sub/.hidden/x.txt", "sub/weights.safetensors",
    "__pycache__/modeling_x.cpython-311.pyc",
)  # fmt: skip


def fill(directory: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)


def source_at(directory: Path) -> Source:
    return Source(directory, str(directory), None, {}, {}, ("oddly_named_weights.dat",))


def quiet() -> Report:
    return Report(Console(quiet=True))


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture
def source(tmp_path) -> Source:
    directory = tmp_path / "source"
    fill(directory, SIDECARS | dict.fromkeys((*OTHERS, "oddly_named_weights.dat"), b"not wanted"))
    return source_at(directory)


def test_every_side_file_and_nothing_else_byte_for_byte(source, tmp_path):
    (tmp_path / "out").mkdir()
    report = quiet()
    copied = copy_sidecars(source, tmp_path / "out", report)
    assert contents(tmp_path / "out") == SIDECARS
    assert copied == list_sidecars(source) == sorted(map(Path, SIDECARS))
    assert report.warnings == []


def test_a_snapshot_of_the_hubs_cache(tmp_path):
    """snapshots/COMMIT holds links to ../../blobs."""
    repo = tmp_path / "models--a--b"
    fill(repo / "blobs", {"1": b"tokens", "2": b"code"})
    snapshot = repo / "snapshots" / "c0ffee"
    (snapshot / "sub").mkdir(parents=True)
    (snapshot / "tokenizer.json").symlink_to("../../blobs/1")
    (snapshot / "sub/x.py").symlink_to("../../../blobs/2")
    (tmp_path / "link").symlink_to(snapshot)  # and the directory that was asked for is a link itself
    (tmp_path / "out").mkdir()
    report = quiet()
    copy_sidecars(source_at(tmp_path / "link"), tmp_path / "out", report)
    assert contents(tmp_path / "out") == {"tokenizer.json": b"tokens", "sub/x.py": b"code"}
    assert not any(p.is_symlink() for p in (tmp_path / "out").rglob("*"))
    assert report.warnings == []


def test_links_that_lead_out_are_named_and_not_followed(tmp_path):
    fill(tmp_path, {"secret": b"key", "blobs/1": b"x", "elsewhere/a.txt": b"x", "source/real.txt": b"real"})
    directory = tmp_path / "source"
    links = {
        "vocab.txt": "../secret", "merges.txt": "/etc/hostname", "chat.jinja": "nowhere", "loop.txt": "loop.txt",
        "folder": "../elsewhere", "blob.json": "../blobs/1", "inside.txt": "real.txt",
    }  # fmt: skip
    for name, target in links.items():
        (directory / name).symlink_to(target)
    os.mkfifo(directory / "pipe")
    (tmp_path / "out").mkdir()
    report = quiet()
    copied = copy_sidecars(source_at(directory), tmp_path / "out", report)
    assert contents(tmp_path / "out") == {"real.txt": b"real", "inside.txt": b"real"}
    assert copied == [Path("inside.txt"), Path("real.txt")]
    warnings = {w.split(" ")[0]: w for w in report.warnings}
    assert set(warnings) == {"vocab.txt", "merges.txt", "chat.jinja", "loop.txt", "folder", "blob.json", "pipe"}
    assert f"leads out of the source, to {tmp_path / 'secret'}" in warnings["vocab.txt"]
    assert "leads nowhere" in warnings["chat.jinja"]
    assert "no regular file" in warnings["pipe"]


def test_blobs_are_the_hubs_only_beside_its_snapshots(tmp_path):
    fill(tmp_path, {"blobs/1": b"x", "models/source/real.txt": b"real"})
    (tmp_path / "models/source/blob.json").symlink_to("../../blobs/1")
    (tmp_path / "out").mkdir()
    report = quiet()
    copy_sidecars(source_at(tmp_path / "models/source"), tmp_path / "out", report)
    assert contents(tmp_path / "out") == {"real.txt": b"real"}
    assert "leads out of the source" in report.warnings[0]


def test_a_link_to_a_directory_inside_is_not_followed(tmp_path):
    fill(tmp_path / "source", {"real/a.txt": b"a"})
    (tmp_path / "source/link").symlink_to("real")
    (tmp_path / "out").mkdir()
    report = quiet()
    copy_sidecars(source_at(tmp_path / "source"), tmp_path / "out", report)
    assert contents(tmp_path / "out") == {"real/a.txt": b"a"}
    assert report.warnings == [
        "link of the source is not copied: it is a directory that cannot be listed, or a link to one"
    ]


def test_a_file_that_cannot_be_read_is_a_warning(source, tmp_path, monkeypatch):
    real = Path.open

    def refuse(path, *args, **kwargs):
        if path.name == "tokenizer.model" and "source" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    (tmp_path / "out").mkdir()
    report = quiet()
    copied = copy_sidecars(source, tmp_path / "out", report)
    assert Path("tokenizer.model") not in copied
    assert len(copied) == len(SIDECARS) - 1
    (warning,) = report.warnings
    assert warning.startswith("tokenizer.model of the source is not copied: [Errno 13] Permission denied")


def test_the_exports_own_files_are_not_overwritten(source, tmp_path):
    fill(tmp_path / "out", {"tokenizer.json": b"ours"})
    report = quiet()
    copy_sidecars(source, tmp_path / "out", report)
    assert (tmp_path / "out/tokenizer.json").read_bytes() == b"ours"
    assert report.warnings == ["tokenizer.json of the source is not copied: the export has a file of that name"]


def test_an_export_that_cannot_be_written_ends_the_run(source, tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(RunError, match=r"out/README\.md: cannot copy .*source/README\.md"):
        copy_sidecars(source, tmp_path / "out", quiet())
