"""Pieces of text into rows of token ids.

The tokens of a data set's documents follow each other - BOS as the tokenizer writes it, the document, EOS if the
tokenizer has one - and are cut into rows of `seq` tokens. There is no padding, so none is attended to and no mask is
needed. What is left at the end is dropped, unless it is all there is: less text than one row makes one shorter row.
Finished rows of token ids are used as they are.

Reading is lazy and in batches: documents are taken until their characters promise the tokens still needed (three
characters a token), tokenized together, packed, and so on until the rows are full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hf_ptq.data.pieces import Piece
from hf_ptq.data.records import TokenRow
from hf_ptq.errors import Problem, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHARACTERS_PER_TOKEN = 3
UNCUT_CHARACTERS = 2**18
CUT_CHARACTERS_PER_TOKEN = 6
CUT_MARGIN_TOKENS = 1024
DOCUMENTS_AT_ONCE = 256

Encode = Callable[[Sequence[Piece], int], Iterator[Sequence[int]]]


@dataclass
class Packed:
    """The rows so far.

    Attributes:
        rows: 1-D int64 on the CPU.
        own_rows: how many of them came as token ids.
        buffer: tokens that begin the next row.
        begins: for each document of text the number of packed tokens before it.
        cut: packed tokens that are in rows.
    """

    rows: list[torch.Tensor] = field(default_factory=list)
    own_rows: int = 0
    buffer: list[int] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    cut: int = 0

    @property
    def documents(self) -> int:
        """Documents with a token in a row."""
        return sum(begin < self.cut for begin in self.begins) + self.own_rows

    @property
    def tokens(self) -> int:
        """Tokens in all rows."""
        return sum(map(len, self.rows))

    def add_text(self, ids: Sequence[int], seq: int, wanted: int) -> None:
        """Append a document's ids and cut off every full row, up to `wanted` rows in all."""
        self.begins.append(self.cut + len(self.buffer))
        self.buffer.extend(ids)
        self._cut_rows(min(len(self.buffer) // seq, wanted - len(self.rows)), seq)

    def add_row(self, ids: Sequence[int]) -> None:
        """Append a finished row."""
        self.rows.append(torch.tensor(ids, dtype=torch.int64))
        self.own_rows += 1

    def close(self) -> None:
        """Make the one shorter row of a data set that holds less than one."""
        if self.buffer and not self.rows:
            self._cut_rows(1, len(self.buffer))

    def _cut_rows(self, count: int, seq: int) -> None:
        self.rows += [torch.tensor(self.buffer[i * seq : (i + 1) * seq], dtype=torch.int64) for i in range(count)]
        del self.buffer[: count * seq]
        self.cut += count * seq


def pack(items: Iterator[Piece | TokenRow], wanted: int, seq: int, encode: Encode) -> Packed:
    """Up to `wanted` rows of `seq` tokens from `items`, of which no more are read than needed.

    Args:
        items: text, and finished rows (which keep their own length).
        wanted: rows.
        seq: tokens of a row.
        encode: (pieces, tokens still needed) -> the ids of each piece, in order.
    """
    packed = Packed()
    while len(packed.rows) < wanted:
        needed = (wanted - len(packed.rows)) * seq - len(packed.buffer)
        batch = _next_batch(items, needed, seq)
        if not batch:
            break
        encoded = encode([item for item in batch if isinstance(item, Piece)], needed)
        for item in batch:
            if len(packed.rows) == wanted:
                break
            if isinstance(item, TokenRow):
                packed.add_row(item.ids)
            else:
                packed.add_text(next(encoded), seq, wanted)
    packed.close()
    return packed


def _next_batch(items: Iterator[Piece | TokenRow], needed: int, seq: int) -> list[Piece | TokenRow]:
    """Documents that promise `needed` tokens (a finished row counts as `seq`), or as many as are taken at once."""
    batch: list[Piece | TokenRow] = []
    promised = 0
    while promised < needed and len(batch) < DOCUMENTS_AT_ONCE:
        item = next(items, None)
        if item is None:
            break
        batch.append(item)
        promised += seq if isinstance(item, TokenRow) else max(1, len(item.text) // CHARACTERS_PER_TOKEN)
    return batch


def encoder(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> Encode:
    """The `encode` of `pack`: special tokens where the piece wants them, then EOS if there is one and it is not there.

    The function it returns raises UserError for a token id that the model's vocabulary does not have.
    """

    def encode(pieces: Sequence[Piece], needed: int) -> Iterator[Sequence[int]]:
        if not pieces:
            return
        assert tokenizer is not None  # pieces.prepare lets no text through without one
        encoded: dict[int, list[int]] = {}
        for special in (True, False):
            chosen = [i for i, piece in enumerate(pieces) if piece.special == special]
            texts = [pieces[i].text for i in chosen]
            encoded |= zip(chosen, tokenize(texts, tokenizer, special, needed), strict=True)
        eos: Any = tokenizer.eos_token_id
        for i, piece in enumerate(pieces):
            ids = encoded[i]
            if eos is not None and not piece.closed and ids[-1:] != [eos]:
                ids.append(eos)
            if max(ids, default=0) >= vocab_size:
                what = f"{piece.where}: the tokenizer makes token id {max(ids)}, the vocabulary has {vocab_size}"
                raise UserError(Problem(what, "use the tokenizer that belongs to the model"))
            yield ids

    return encode


def tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase, special: bool, needed: int) -> list[list[int]]:
    """The ids of each text, whole; only of a text far longer than `needed` tokens just the beginning.

    A book of a gigabyte would take many minutes and hundreds of gigabytes for a few hundred rows: its beginning is
    enough, as long as the cut is well behind the last token used. Where it is not, a longer beginning is tried.
    """
    enough = needed + CUT_MARGIN_TOKENS
    limit = max(UNCUT_CHARACTERS, CUT_CHARACTERS_PER_TOKEN * enough)
    ids = _call(tokenizer, [text[:limit] for text in texts], special)
    while short := [i for i, text in enumerate(texts) if len(text) > limit and len(ids[i]) < enough]:
        limit *= 4
        for i, longer in zip(short, _call(tokenizer, [texts[i][:limit] for i in short], special), strict=True):
            ids[i] = longer
    return ids


def _call(tokenizer: PreTrainedTokenizerBase, texts: list[str], special: bool) -> list[list[int]]:
    if not texts:
        return []
    # verbose=False: a document may be longer than the model's context; its rows are not.
    encoding = tokenizer(
        texts, add_special_tokens=special, padding=False, truncation=False, return_attention_mask=False, verbose=False
    )
    return list(encoding["input_ids"])  # pyright: ignore[reportArgumentType]
