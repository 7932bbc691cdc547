"""Calibration data from files of the user: every record with its place, read lazily.

A reader turns one file into documents, and a record that cannot be used into a `Problem` naming file and line (for
.parquet and .safetensors, which have no lines, the row); after a malformed record it goes on with the next where the
format allows that, so that one message can list several. JSON is read record by record from its text, which keeps the
line of each; tables are read in batches.

Readers never decide what is done about a problem, and never tokenize.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hf_ptq.data.records import FIELDS, Document, Text, read_record
from hf_ptq.errors import Problem

MAX_CSV_CELL_CHARACTERS = 2**30
PARQUET_ROWS_AT_ONCE = 256
RECORD_COLUMNS = (*FIELDS, "completion", "attention_mask", "tools")
JSON_BLANKS = " \t\r\n"

Reader = Callable[[Path], Iterator[Document | Problem]]


def list_files(path: Path) -> list[Path]:
    """The data files that `path` stands for: itself, or all of a known kind below a folder (hidden ones left out).

    Sorted by their path inside the folder, so that the order does not depend on the file system.
    """
    if not path.is_dir():
        return [path]
    found: list[Path] = []
    for folder, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted(file for file in found if file.suffix.lower() in READERS)


def path_problems(path: Path) -> list[Problem]:
    """What can be said against `path` without reading it: kind, emptiness, permission."""
    kinds = ", ".join(READERS)
    if path.is_dir():
        files = list_files(path)
        if not files:
            return [Problem(f"--dataset {path}: the folder holds no data file", f"these kinds are read: {kinds}")]
        return [problem for file in files for problem in _unreadable(file)]
    if path.suffix.lower() not in READERS:
        return [Problem(f"--dataset {path}: files of kind {path.suffix!r} cannot be read", f"these can: {kinds}")]
    if path.stat().st_size == 0:
        return [Problem(f"--dataset {path}: the file is empty")]
    return _unreadable(path)


def _unreadable(file: Path) -> list[Problem]:
    if os.access(file, os.R_OK):
        return []
    return [Problem(f"--dataset {file}: the file may not be read", "check its permissions")]


def local_documents(path: Path) -> Iterator[Document | Problem]:
    """The documents of a file, or of all files of a folder, in order; nothing is read before it is asked for."""
    for file in list_files(path):
        try:
            yield from READERS[file.suffix.lower()](file)
        except OSError as error:
            yield Problem(f"{file}: {error.strerror or error}")


def _decoded(data: bytes, file: Path, first_line: int = 1) -> str | Problem:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        return Problem(f"{file}, line {line}: not UTF-8 (byte 0x{data[error.start]:02x})", "convert the file to UTF-8")


def _read_jsonl(file: Path) -> Iterator[Document | Problem]:
    """A record a line; blank lines are allowed."""
    with file.open("rb") as lines:
        for number, data in enumerate(lines, 1):
            line = _decoded(data, file, number)
            if isinstance(line, Problem):
                yield line
            elif line.strip():
                yield _parse(line.rstrip(), f"{file}, line {number}")


def _parse(line: str, where: str) -> Document | Problem:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        return Problem(f"{where}: not JSON ({error.msg} at column {error.colno})")
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; nesting without end
        return Problem(f"{where}: not JSON that can be read ({str(error).split(';')[0]})")
    return read_record(record, where)


def _read_json(file: Path) -> Iterator[Document | Problem]:
    """A list of records, one record, or a record a line (many files named .json are that)."""
    text = _decoded(file.read_bytes(), file)
    if isinstance(text, Problem):
        yield text
        return
    stripped = text.lstrip(JSON_BLANKS)
    if stripped.startswith("["):
        yield from _read_json_list(file, text, len(text) - len(stripped) + 1)
    elif _is_json(stripped.partition("\n")[0]):
        yield from _read_jsonl(file)
    elif stripped:
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            yield _json_problem(file, text, error)
        else:
            yield read_record(record, f"{file}, line {_line(text, len(text) - len(stripped))}")


def _read_json_list(file: Path, text: str, position: int) -> Iterator[Document | Problem]:
    """The records of a list whose `[` is just before `position`, each with the line it begins in."""
    decoder = json.JSONDecoder()
    line, counted = 1, 0
    while True:
        position = _skip_blanks(text, position)
        if text.startswith("]", position):
            return
        line, counted = line + text.count("\n", counted, position), position
        try:
            record, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            yield _json_problem(file, text, error)
            return
        yield read_record(record, f"{file}, line {line}")
        position = _skip_blanks(text, position)
        if text.startswith(",", position):
            position += 1
        elif not text.startswith("]", position):
            yield _json_problem(file, text, json.JSONDecodeError("Expecting ',' or ']'", text, position))
            return


def _skip_blanks(text: str, position: int) -> int:
    while position < len(text) and text[position] in JSON_BLANKS:
        position += 1
    return position


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _json_problem(file: Path, text: str, error: Exception) -> Problem:
    if isinstance(error, json.JSONDecodeError):
        return Problem(f"{file}, line {_line(text, error.pos)}: not JSON ({error.msg} at column {error.colno})")
    return Problem(f"{file}: not JSON that can be read ({str(error).split(';')[0]})")


def _read_txt(file: Path) -> Iterator[Document | Problem]:
    text = _decoded(file.read_bytes(), file)
    yield text if isinstance(text, Problem) else Text(text, str(file))


def _read_csv(file: Path) -> Iterator[Document | Problem]:
    """The first line names the columns; a cell may span lines, a record is placed at the line it begins in."""
    text = _decoded(file.read_bytes(), file)
    if isinstance(text, Problem):
        yield text
        return
    # The limit is a setting of the csv module (128 KiB a cell, less than a document): it is put back when done.
    limit = csv.field_size_limit(MAX_CSV_CELL_CHARACTERS)
    try:
        yield from _csv_records(file, text)
    finally:
        csv.field_size_limit(limit)


def _csv_records(file: Path, text: str) -> Iterator[Document | Problem]:
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    columns: list[str] | None = None
    while True:
        where = f"{file}, line {rows.line_num + 1}"
        try:
            cells = next(rows, None)
        except csv.Error as error:
            yield Problem(f"{where}: not CSV ({error})")
            return
        if cells is None:
            return
        if not cells:  # a blank line
            continue
        if columns is None:
            columns = [name.strip() for name in cells]
            if not any(column in FIELDS for column in columns):
                yield read_record(dict.fromkeys(columns), f"{where} (the names of the columns)")
                return
        elif len(cells) != len(columns):
            yield Problem(f"{where}: {len(cells)} cells in a table of {len(columns)} columns")
        else:
            yield read_record(dict(zip(columns, cells, strict=True)), where)


def _read_parquet(file: Path) -> Iterator[Document | Problem]:
    import pyarrow
    import pyarrow.parquet

    number = itertools.count(1)
    try:
        table = pyarrow.parquet.ParquetFile(file)
        names = table.schema_arrow.names
        columns = [column for column in RECORD_COLUMNS if column in names]
        if not any(column in FIELDS for column in columns):
            yield read_record(dict.fromkeys(names), f"{file} (its columns)")
            return
        for batch in table.iter_batches(PARQUET_ROWS_AT_ONCE, columns=columns):
            for record in batch.to_pylist():
                yield read_record(record, f"{file}, row {next(number)}")
    except pyarrow.ArrowException as error:
        yield Problem(f"{file}: not a parquet file that can be read ({str(error).splitlines()[0]})")


def _read_safetensors(file: Path) -> Iterator[Document | Problem]:
    """The rows of the tensor `input_ids` ([rows, tokens] or one row), of int64 or int32."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as tensors:
            names = list(tensors.keys())
            if "input_ids" not in names:
                yield Problem(f"{file}: no tensor `input_ids` (found: {', '.join(names[:8]) or 'none'})")
                return
            ids = tensors.get_tensor("input_ids")
            mask = tensors.get_tensor("attention_mask") if "attention_mask" in names else None
    except SafetensorError as error:
        yield Problem(f"{file}: not a safetensors file that can be read ({error})")
        return
    yield from _tensor_rows(file, ids, mask)


def _tensor_rows(file: Path, ids: Any, mask: Any) -> Iterator[Document | Problem]:
    dtype = str(ids.dtype).removeprefix("torch.")
    if dtype not in ("int64", "int32") or ids.dim() not in (1, 2):
        yield Problem(f"{file}: `input_ids` is {dtype} {list(ids.shape)}; it must be int64 or int32 [rows, tokens]")
        return
    if mask is not None and mask.shape != ids.shape:
        yield Problem(f"{file}: `attention_mask` is {list(mask.shape)} and `input_ids` {list(ids.shape)}")
        return
    rows = ids if ids.dim() == 2 else ids[None]
    masks = None if mask is None else mask.reshape(rows.shape)
    for number, row in enumerate(rows):
        record: dict[str, Any] = {"input_ids": row.tolist()}
        if masks is not None:
            record["attention_mask"] = masks[number].tolist()
        yield read_record(record, f"{file}, row {number + 1}")


READERS: dict[str, Reader] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".txt": _read_txt,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".safetensors": _read_safetensors,
}
