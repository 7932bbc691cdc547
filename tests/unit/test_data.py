"""Documents in, rows of token ids out: packing, special tokens, token ids, refusals, digest and batches."""

from __future__ import annotations

import hashlib
import itertools
import struct

import pytest
import torch
from data_tools import BOS, EOS, PAD, Heard, ids, jsonl, make_tokenizer, w, words
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hf_ptq.data import datasets as named
from hf_ptq.data import packing, pieces
from hf_ptq.data.packing import Packed, pack, tokenize
from hf_ptq.data.pieces import Piece
from hf_ptq.data.rows import DatasetUse, batches, deal, read_calibration, rows_digest
from hf_ptq.errors import UserError


@pytest.fixture
def heard():
    return Heard()


# Packing


@pytest.mark.parametrize(
    ("special", "eos", "first", "second"),
    [
        ("", True, [*w(0, 1, 2), EOS], [*w(3, 4, 5), EOS]),
        ("<s> $A", True, [BOS, *w(0, 1, 2), EOS], [BOS, *w(3, 4, 5), EOS]),
        ("<s> $A </s>", True, [BOS, *w(0, 1, 2), EOS], [BOS, *w(3, 4, 5), EOS]),
        ("", False, w(0, 1, 2), w(3, 4, 5)),
    ],
)
def test_documents_are_packed_with_bos_and_eos_once(tmp_path, heard, special, eos, first, second):
    file = jsonl(tmp_path / "a.jsonl", {"text": words(0, 1, 2)}, {"text": words(3, 4, 5)})
    tokenizer = make_tokenizer(special, eos=eos)
    stream = first + second
    data = read_calibration([file], [2], 3, tokenizer, heard.report)
    assert ids(data) == [stream[:3], stream[3:6]]
    assert data.uses == (DatasetUse(file, 2, 6, 2),)
    assert not heard.warnings


def test_a_tokenizer_with_neither_pad_nor_eos_works(tmp_path, heard):
    tokenizer = make_tokenizer(eos=False)
    assert tokenizer.pad_token is None
    assert tokenizer.eos_token_id is None
    file = jsonl(tmp_path / "a.jsonl", {"text": words(0, 1)}, {"text": words(2, 3, 4, 5)})
    assert ids(read_calibration([file], [2], 3, tokenizer, heard.report)) == [w(0, 1, 2), w(3, 4, 5)]


def test_the_rest_is_dropped_and_fewer_rows_are_announced(tmp_path, heard):
    file = jsonl(tmp_path / "a.jsonl", {"text": words(*range(6))}, {"text": words(6)}, {"text": words(7)})
    data = read_calibration([file], [4], 4, make_tokenizer(), heard.report)
    assert ids(data) == [w(0, 1, 2, 3), [*w(4, 5), EOS, *w(6)]]
    assert data.uses == (DatasetUse(file, 2, 8, 2),)  # the third document is in no row
    assert f"{file}: 2 rows instead of the 4 asked for (2 documents gave 8 tokens; a row has 4)" in heard.warnings


def test_less_text_than_a_row_is_one_shorter_row(tmp_path, heard):
    file = jsonl(tmp_path / "a.jsonl", {"text": words(0)}, {"text": words(1)})
    data = read_calibration([file], [], 512, make_tokenizer(), heard.report)
    assert ids(data) == [[*w(0), EOS, *w(1), EOS]]
    assert data.uses == (DatasetUse(file, 2, 4, 1),)
    assert "1 rows instead of the 512 asked for" in heard.warnings


def test_rows_do_not_mix_data_sets(tmp_path, heard):
    one = jsonl(tmp_path / "a.jsonl", {"text": words(*range(5))})
    two = jsonl(tmp_path / "b.jsonl", {"text": words(*range(50, 59))})
    data = read_calibration([one, two], [1, 2], 4, make_tokenizer(), heard.report)
    assert ids(data) == [w(0, 1, 2, 3), w(50, 51, 52, 53), w(54, 55, 56, 57)]
    assert data.uses == (DatasetUse(one, 1, 4, 1), DatasetUse(two, 1, 8, 2))
    assert data.as_dict() == {
        "datasets": [
            {"name": one, "documents": 1, "tokens": 4, "rows": 1},
            {"name": two, "documents": 1, "tokens": 8, "rows": 2},
        ],
        "rows": 3,
        "tokens": 12,
        "sha256": data.sha256,
    }


def test_one_size_is_the_total(tmp_path, heard):
    files = [jsonl(tmp_path / f"{i}.jsonl", {"text": words(*range(50))}) for i in range(2)]
    assert [use.rows for use in read_calibration(files, [5], 4, make_tokenizer(), heard.report).uses] == [3, 2]


def test_reading_stops_when_the_rows_are_full(tmp_path, heard, monkeypatch):
    read = itertools.count()
    monkeypatch.setattr(named, "load_stream", lambda *_: ({"text": words(*range(20))} for _ in read))
    data = read_calibration(["c4"], [10], 20, make_tokenizer(), heard.report)
    assert [len(row) for row in data.rows] == [20] * 10
    assert 10 <= next(read) <= 20


def test_an_endless_local_source_is_read_lazily():
    read = itertools.count()
    items = (Piece("xyz" * 30, f"{i}", special=True) for i in read)
    packed = pack(items, 8, 16, lambda batch, needed: iter([list(range(30))] * len(batch)))
    assert len(packed.rows) == 8
    assert next(read) <= 6


def test_small_batches_of_documents_change_nothing(tmp_path, heard, monkeypatch):
    file = jsonl(tmp_path / "a.jsonl", *({"text": words(*range(i % 17))} for i in range(1, 200)))
    expected = read_calibration([file], [20], 16, make_tokenizer("<s> $A"), heard.report)
    monkeypatch.setattr(packing, "DOCUMENTS_AT_ONCE", 1)
    again = read_calibration([file], [20], 16, make_tokenizer("<s> $A"), heard.report)
    assert ids(again) == ids(expected)
    assert again.uses == expected.uses
    assert again.sha256 == expected.sha256


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), max_size=30), seq=st.integers(1, 20), wanted=st.integers(1, 12))
def test_packing_keeps_every_token_in_order(lengths, seq, wanted):
    numbers = itertools.count()
    documents = [[next(numbers) for _ in range(length)] for length in lengths]
    by_text = {str(i): document for i, document in enumerate(documents)}
    items = (Piece(str(i), "", special=True) for i in range(len(documents)))
    packed = pack(items, wanted, seq, lambda batch, needed: iter([by_text[piece.text] for piece in batch]))
    flat = [token for document in documents for token in document]
    rows = [row.tolist() for row in packed.rows]
    full = min(wanted, len(flat) // seq)
    assert rows == ([flat[i * seq : (i + 1) * seq] for i in range(full)] or ([flat] if flat else []))
    used = sum(map(len, rows))
    assert packed.tokens == used
    assert packed.documents == sum(document[0] < used for document in documents)


def test_a_book_is_tokenized_as_far_as_needed(monkeypatch):
    monkeypatch.setattr(packing, "UNCUT_CHARACTERS", 100)
    monkeypatch.setattr(packing, "CUT_MARGIN_TOKENS", 5)
    tokenizer = make_tokenizer("<s> $A")
    book = " ".join(f"w{i % 100}" for i in range(10_000))
    whole = tokenizer(book)["input_ids"]
    (beginning,) = tokenize([book], tokenizer, True, 20)
    assert beginning[:20] == whole[:20]  # pyright: ignore
    assert 25 <= len(beginning) < 100
    spaces = "w1" + " " * 5000 + "w2 w3"  # the beginning holds too little: all of it is tokenized
    assert tokenize([spaces], tokenizer, True, 2) == [[BOS, *w(1, 2, 3)]]


def test_no_warning_about_the_length_of_documents(tmp_path, heard, caplog, capfd):
    file = jsonl(tmp_path / "a.jsonl", {"text": words(*range(99))})
    read_calibration([file], [1], 50, make_tokenizer(), heard.report)
    assert "sequence length" not in caplog.text + "".join(capfd.readouterr())


def test_token_ids_beyond_the_models_vocabulary_are_refused(tmp_path, heard):
    file = jsonl(tmp_path / "a.jsonl", {"text": words(1)}, {"text": words(99)})
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: the tokenizer makes token id 103, the vocabulary has 103"):
        read_calibration([file], [1], 4, make_tokenizer(), heard.report, vocab_size=103)
    assert ids(read_calibration([file], [1], 4, make_tokenizer(), heard.report, vocab_size=104))


# Rows of token ids


def test_rows_of_token_ids_are_used_as_they_are(tmp_path, heard):
    rows = torch.arange(6 * 24).reshape(6, 24)
    save_file({"input_ids": rows}, tmp_path / "calib.safetensors")
    name = str(tmp_path / "calib.safetensors")
    data = read_calibration([name], [], 512, None, heard.report)
    assert ids(data) == rows.tolist()
    assert data.uses == (DatasetUse(name, 6, 144, 6),)
    assert not heard.warnings
    assert ids(read_calibration([name], [4], 512, None, heard.report)) == rows[:4].tolist()
    assert not heard.warnings
    assert len(read_calibration([name], [8], 512, None, heard.report).rows) == 6
    assert "6 rows instead of the 8 asked for" in heard.warnings


def test_the_default_number_limits_token_ids_and_says_so(tmp_path, heard):
    save_file({"input_ids": torch.ones(600, 2, dtype=torch.int32)}, tmp_path / "a.safetensors")
    assert len(read_calibration([str(tmp_path / "a.safetensors")], [], 2, None, heard.report).rows) == 512
    assert "only its first 512 rows are used (the default); --calib_size takes more" in heard.warnings


def test_jsonl_rows_of_any_length_and_text_beside_them(tmp_path, heard):
    file = jsonl(
        tmp_path / "a.jsonl",
        {"input_ids": [9, 8, 7, 6, 5]},
        {"text": words(0, 1)},
        {"input_ids": [4]},
        {"text": words(2, 3)},
        {"input_ids": [PAD, 9], "attention_mask": [0, 1]},
    )
    data = read_calibration([file], [5], 3, make_tokenizer(), heard.report)
    assert ids(data) == [[9, 8, 7, 6, 5], [*w(0, 1), EOS], [4], [*w(2, 3), EOS], [9]]
    assert "padding left out of rows of token ids, tokens: 1" in heard.warnings


@pytest.mark.parametrize(("bad", "vocab_size"), [(-100, None), (300, None), (198, 198), (2**40, None)])
def test_ids_outside_of_the_vocabulary_name_the_row(tmp_path, heard, bad, vocab_size):
    file = jsonl(tmp_path / "a.jsonl", {"input_ids": [1, 2]}, {"input_ids": [1, 2, bad]})
    with pytest.raises(UserError) as error:
        read_calibration([file], [2], 4, make_tokenizer(), heard.report, vocab_size=vocab_size)
    assert f"{file}, line 2: token id {bad} at position 2 is not in the vocabulary" in str(error.value)


def test_the_models_vocabulary_counts_not_the_tokenizers(tmp_path, heard):
    file = jsonl(tmp_path / "a.jsonl", {"input_ids": [300]})
    assert ids(read_calibration([file], [1], 4, make_tokenizer(), heard.report, vocab_size=301)) == [[300]]


def test_text_without_a_tokenizer_is_refused(tmp_path, heard):
    file = jsonl(tmp_path / "a.jsonl", {"input_ids": [1]}, {"text": "x"})
    with pytest.raises(UserError, match=r"line 2: text needs a tokenizer[\s\S]*input_ids"):
        read_calibration([file], [2], 4, None, heard.report)


# Refusals


def test_malformed_rows_are_refused_together(tmp_path, heard):
    records = [{"text": "w1"}, {"text": 1}, {"text": "w2"}, {"txt": "x"}, *[{"text": None}] * 30]
    one = jsonl(tmp_path / "a.jsonl", *records)
    two = jsonl(tmp_path / "b.jsonl", {"text": []})
    with pytest.raises(UserError) as error:
        read_calibration([one, two], [100], 512, make_tokenizer(), heard.report)
    said = [problem.what for problem in error.value.problems]
    assert said[0] == f"{one}, line 2: `text` is a string, not int"
    assert said[1] == f"{one}, line 4: no field that can be used (found: txt)"
    assert len(said) == 11
    assert said[10] == f"{two}, line 1: `text` is a string, not list"


def test_a_malformed_row_after_the_last_one_needed_is_not_read(tmp_path, heard):
    file = jsonl(tmp_path / "a.jsonl", {"text": words(*range(50))}, {"text": 1})
    assert len(read_calibration([file], [2], 20, make_tokenizer(), heard.report).rows) == 2


@pytest.mark.parametrize("records", [[{"text": ""}, {"text": " \n"}], [{"prompt": "", "completion": ""}]])
def test_no_usable_rows(tmp_path, heard, records):
    file = jsonl(tmp_path / "a.jsonl", *records)
    with pytest.raises(UserError, match=r"--dataset .*a\.jsonl: no usable rows"):
        read_calibration([file], [], 8, make_tokenizer(), heard.report)
    assert "blank documents, left out" in heard.warnings


def test_blank_documents_are_counted(tmp_path, heard):
    file = jsonl(tmp_path / "a.jsonl", {"text": ""}, {"text": words(0, 1)}, {"text": "\n"})
    assert ids(read_calibration([file], [1], 3, make_tokenizer(), heard.report)) == [[*w(0, 1), EOS]]
    assert f"{file}: blank documents, left out: 2 (first: {file}, line 1)" in heard.warnings


def test_everything_cheap_is_refused_at_once(tmp_path, heard):
    with pytest.raises(UserError) as error:
        read_calibration(["wikitxt", "a.jsonl"], [1, 2, 3], 0, make_tokenizer(), heard.report)
    message = str(error.value)
    for part in ("--dataset wikitxt", "--dataset a.jsonl", "--calib_size 1,2,3 has 3 numbers", "--calib_seq 0"):
        assert part in message


def test_all_data_sets_that_cannot_be_reached_are_named(heard, monkeypatch):
    def broken(path, *_):
        raise ConnectionError(f"no way to {path}")

    monkeypatch.setattr(named, "load_stream", broken)
    with pytest.raises(UserError) as error:
        read_calibration([], [], 8, make_tokenizer(), heard.report)
    said = [problem.what for problem in error.value.problems]
    assert len(said) == 2
    assert "no way to abisee/cnn_dailymail" in said[0]
    assert "no way to nvidia/Nemotron-Post-Training-Dataset-v2" in said[1]


def test_a_public_set_of_unusable_records_ends(heard, monkeypatch):
    monkeypatch.setattr(named, "load_stream", lambda *_: itertools.repeat({"body": "x"}))
    monkeypatch.setattr(pieces, "SKIPPED_IN_A_ROW", 50)
    with pytest.raises(UserError, match="--dataset c4: 50 records one after the other cannot be used"):
        read_calibration(["c4"], [1], 8, make_tokenizer(), heard.report)


# Digest and batches


def test_the_digest_is_of_lengths_and_ids():
    rows = [torch.tensor([1, 2, 3]), torch.tensor([4])]
    expected = hashlib.sha256(struct.pack("<Q3q", 3, 1, 2, 3) + struct.pack("<Qq", 1, 4)).hexdigest()
    assert rows_digest(rows) == expected
    assert rows_digest([row.to(torch.int32) for row in rows]) == expected
    others = [
        [torch.tensor([1, 2]), torch.tensor([3, 4])],
        [torch.tensor([1, 2, 3, 4])],
        [torch.tensor([4]), rows[0]],
        [torch.tensor([1, 2, 4]), rows[1]],
        rows[:1],
        [],
    ]
    digests = {rows_digest(other) for other in others}
    assert len(digests) == len(others)
    assert expected not in digests


def test_the_same_input_gives_the_same_rows(heard):
    first = read_calibration(["pydoc"], [8], 64, make_tokenizer(), heard.report)
    again = read_calibration(["pydoc"], [8], 64, make_tokenizer(), Heard().report)
    assert ids(first) == ids(again)
    assert first.sha256 == again.sha256 == rows_digest(first.rows)
    assert [len(row) for row in first.rows] == [64] * 8
    assert not heard.warnings


def test_batches_take_equal_neighbours_in_order():
    rows = [torch.full((length,), i) for i, length in enumerate([4, 4, 4, 2, 4, 4])]
    found = [batch.tolist() for batch in batches(rows, 2)]
    assert found == [[[0] * 4, [1] * 4], [[2] * 4], [[3] * 2], [[4] * 4, [5] * 4]]
    assert [tuple(batch.shape) for batch in batches(rows, 100)] == [(3, 4), (1, 2), (2, 4)]
    assert list(batches([], 3)) == []
    with pytest.raises(ValueError, match="batch_size is 0"):
        next(batches(rows, 0))


@given(st.integers(1, 9), st.integers(0, 30))
def test_rows_are_dealt_once_and_evenly(world, more):
    rows = [torch.tensor([i]) for i in range(world + more)]
    hands = [[int(row) for row in deal(rows, rank, world)] for rank in range(world)]
    assert sorted(itertools.chain(*hands)) == list(range(len(rows)))
    assert hands[0] == list(range(0, len(rows), world))
    assert {len(hand) - len(rows) // world for hand in hands} <= {0, 1}


@pytest.mark.parametrize("rank", [0, 3])
def test_fewer_rows_than_ranks_are_refused_on_every_rank(rank):
    rows = [torch.tensor([i]) for i in range(3)]
    with pytest.raises(UserError) as caught:
        deal(rows, rank, 4)
    (problem,) = caught.value.problems
    assert problem.what == "3 calibration rows cannot be dealt to 4 ranks"
    assert problem.cure == "--calib_size 4 or more, or fewer ranks"
    assert [int(row) for row in deal(rows, 0, 1)] == [0, 1, 2]


def test_packed_counts_a_document_that_ends_on_the_cut():
    packed = Packed()
    for document in ([1, 2], [3, 4], [5]):
        packed.add_text(document, 4, 10)
    packed.close()
    assert (packed.documents, packed.tokens, packed.own_rows) == (2, 4, 0)
