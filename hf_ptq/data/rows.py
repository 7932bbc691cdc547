"""Calibration rows: what the calibration loop feeds to the model.

`read_calibration` is the whole way from `--dataset` and `--calib_size` to rows of token ids, one data set after the
other: documents (datasets.py, local_files.py), made ready (pieces.py, chat.py), packed (packing.py). A row never holds
two data sets. The digest of the rows goes into the report, so that two runs can be compared.

This file does not know models. Rank 0 reads, and the others get the ids from rank 0; then the rows are dealt to the
ranks, so that together they run the same rows as one process would.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_ptq.data.datasets import DATASETS, DEFAULT_DATASETS, check_datasets_cheaply, open_documents, resolve_sizes
from hf_ptq.data.packing import encoder, pack
from hf_ptq.data.pieces import Notes, Piece, prepare, refuse_problems, skip_problems
from hf_ptq.data.records import Document, TokenRow
from hf_ptq.errors import Problem, UserError, refuse_if_any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_ptq.report import Report

MAX_TOKEN_IDS = 2**31


@dataclass(frozen=True)
class DatasetUse:
    """What was used of one data set: documents with a token in a row, tokens in its rows, rows."""

    name: str
    documents: int
    tokens: int
    rows: int


@dataclass(frozen=True)
class CalibrationData:
    """The calibration rows.

    Attributes:
        rows: 1-D int64 token ids on the CPU; nearly always `seq` long.
        uses: per data set, in the order of `--dataset`.
        sha256: of the lengths and ids; changes with any id and any row boundary.
    """

    rows: tuple[torch.Tensor, ...]
    uses: tuple[DatasetUse, ...]
    sha256: str

    def as_dict(self) -> dict[str, Any]:
        """What the report says about the data (no ids)."""
        return {
            "datasets": [asdict(use) for use in self.uses],
            "rows": len(self.rows),
            "tokens": sum(use.tokens for use in self.uses),
            "sha256": self.sha256,
        }


@dataclass(frozen=True)
class Request:
    """One data set's part: `rows` of `seq` tokens; `by_default`: nobody asked for that number."""

    name: str
    rows: int
    seq: int
    by_default: bool


def read_calibration(
    datasets: Sequence[str],
    sizes: Sequence[int],
    seq: int,
    tokenizer: PreTrainedTokenizerBase | None,
    report: Report,
    *,
    vocab_size: int | None = None,
) -> CalibrationData:
    """Read, tokenize and pack the calibration data.

    Args:
        datasets: names of `DATASETS` or paths; empty for the default ones.
        sizes: rows of each, or one total; empty for 512 in all (see `datasets.resolve_sizes`).
        seq: tokens of a row.
        tokenizer: may be None if all data is rows of token ids.
        report: gets warnings (fewer rows than asked for, skipped documents, a missing chat template) and progress.
        vocab_size: of the model; token ids at or above it are refused. None: the tokenizer's size.

    Returns:
        The rows of the first data set, then of the second, ...; the same input gives the same rows.

    Raises:
        UserError: with the problems of all data sets: what `check_datasets_cheaply` finds, a hub data set that cannot
            be reached, malformed records (file and line), ids outside of the vocabulary, no usable rows, no tokenizer.
    """
    datasets = tuple(datasets) or DEFAULT_DATASETS
    problems = check_datasets_cheaply(datasets, sizes)
    if seq < 1:
        problems.append(Problem(f"--calib_seq {seq}: a row has at least one token"))
    refuse_if_any(problems)
    if vocab_size is None:
        vocab_size = MAX_TOKEN_IDS if tokenizer is None else len(tokenizer)

    counts = resolve_sizes(datasets, sizes)
    requests = [Request(name, count, seq, by_default=not sizes) for name, count in zip(datasets, counts, strict=True)]
    opened = _open_all(requests)
    rows: list[torch.Tensor] = []
    uses: list[DatasetUse] = []
    with report.progress("calibration data", sum(counts), "rows") as advance:
        for request, documents in zip(requests, opened, strict=True):
            try:
                packed, use = _read_one(request, documents, tokenizer, vocab_size, report)
            except UserError as error:
                problems.extend(error.problems)
                continue
            rows += packed
            uses.append(use)
            advance(use.rows)
    refuse_if_any(problems)
    return CalibrationData(tuple(rows), tuple(uses), rows_digest(rows))


def rows_digest(rows: Iterable[torch.Tensor]) -> str:
    """SHA-256 (hex) over each row's length and ids, as little-endian int64."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row).to_bytes(8, "little"))
        digest.update(row.to(torch.int64).numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def batches(rows: Sequence[torch.Tensor], batch_size: int) -> Iterator[torch.Tensor]:
    """Batches [b, s] int64 of at most `batch_size` rows: consecutive rows of one length, in order, without padding."""
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}")
    for _, group in itertools.groupby(rows, key=len):
        while batch := list(itertools.islice(group, batch_size)):
            yield torch.stack(batch)


def too_few_rows(count: int, world_size: int) -> list[Problem]:
    """A problem if so many rows leave a rank without any."""
    if count >= world_size:
        return []
    what = f"{count} calibration row{'s' * (count != 1)} cannot be dealt to {world_size} ranks"
    return [Problem(what, f"--calib_size {world_size} or more, or fewer ranks")]


def deal(rows: Sequence[torch.Tensor], rank: int, world_size: int) -> list[torch.Tensor]:
    """The rows of `rank`: every `world_size`-th. Raises UserError where a rank would get none."""
    refuse_if_any(too_few_rows(len(rows), world_size))
    return list(rows[rank::world_size])


def _open_all(requests: Sequence[Request]) -> list[Iterator[Document | Problem]]:
    """Every data set is reached before one is read: a missing token shows at once, with whatever else is missing."""
    opened, problems = [], []
    for request in requests:
        try:
            opened.append(open_documents(request.name))
        except UserError as error:
            problems.extend(error.problems)
    refuse_if_any(problems)
    return opened


def _read_one(
    request: Request,
    documents: Iterator[Document | Problem],
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    report: Report,
) -> tuple[list[torch.Tensor], DatasetUse]:
    notes = Notes()
    prepared = prepare(documents, tokenizer, vocab_size, notes)
    public = request.name in DATASETS
    sound = skip_problems(prepared, request.name, notes) if public else refuse_problems(prepared)
    packed = pack(sound, request.rows, request.seq, encoder(tokenizer, vocab_size))
    use = DatasetUse(request.name, packed.documents, packed.tokens, len(packed.rows))
    notes.tell(use.name, report)
    if not use.rows:
        raise UserError(Problem(f"--dataset {use.name}: no usable rows (it holds no document that is not blank)"))
    _compare(use, request, own_rows_only=packed.own_rows == use.rows, rest=sound, report=report)
    return packed.rows, use


def _compare(
    use: DatasetUse, request: Request, *, own_rows_only: bool, rest: Iterator[Piece | TokenRow], report: Report
) -> None:
    """Warn where what was read is not what was asked for; nobody asks for a number of rows of token ids by default."""
    if use.rows < request.rows and not (own_rows_only and request.by_default):
        report.warn(
            f"{use.name}: {use.rows} rows instead of the {request.rows} asked for"
            f" ({use.documents} documents gave {use.tokens} tokens; a row has {request.seq})"
        )
    elif use.rows == request.rows and own_rows_only and request.by_default and next(rest, None) is not None:
        report.warn(f"{use.name}: only its first {use.rows} rows are used (the default); --calib_size takes more")
