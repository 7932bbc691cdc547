"""Documents made ready for the tokenizer: chats rendered, token ids checked, what cannot be used set apart.

A record that cannot be used: in the user's own data it is an error, which lists the next few as well; in a public data
set it is skipped, counted and reported, unless so many follow each other that the set cannot be what it should be.

This file decides what is used. It does not know rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_ptq.data.chat import render
from hf_ptq.data.records import Chat, Document, TokenRow
from hf_ptq.errors import Problem, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_ptq.report import Report

PROBLEMS_LISTED = 10
PROBLEM_LOOKAHEAD = 10_000
SKIPPED_IN_A_ROW = 1000


@dataclass(frozen=True)
class Piece:
    """Text for the tokenizer.

    Attributes:
        text: not blank.
        where: its place, for messages.
        special: BOS and the like are the tokenizer's to add (a chat template has written its own).
        closed: the text ends in EOS already.
    """

    text: str
    where: str
    special: bool
    closed: bool = False


@dataclass
class Notes:
    """What happened to documents of one data set: what -> (how often, where first); and how many were templated."""

    found: dict[str, tuple[int, str]] = field(default_factory=dict)
    templated: int = 0

    def add(self, what: str, where: str, count: int = 1) -> None:
        """Count `what`, which happened at `where`."""
        before, first = self.found.get(what, (0, where))
        self.found[what] = (before + count, first)

    def tell(self, name: str, report: Report) -> None:
        """Give everything to the report: what was unexpected as warnings."""
        if self.templated:
            report.say(f"{name}: {self.templated} chats, rendered with the model's chat template")
        for what, (count, first) in self.found.items():
            report.warn(f"{name}: {what}: {count} (first: {first})")


def prepare(
    documents: Iterable[Document | Problem],
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    notes: Notes,
) -> Iterator[Piece | TokenRow | Problem]:
    """Chats rendered, token ids checked against 0..`vocab_size` - 1, blank documents left out (and noted).

    Raises:
        UserError: at the first text, if there is no tokenizer.
    """
    for document in documents:
        if isinstance(document, Problem):
            yield document
        elif isinstance(document, TokenRow):
            yield _in_vocabulary(document, vocab_size)
            if document.padding:
                notes.add("padding left out of rows of token ids, tokens", document.where, document.padding)
        elif tokenizer is None:
            what = f"{document.where}: text needs a tokenizer, and the model has none"
            raise UserError(Problem(what, "give rows of token ids (`input_ids`), or a model with a tokenizer"))
        else:
            chat = isinstance(document, Chat)
            piece = _rendered(document, tokenizer, notes) if chat else Piece(document.text, document.where, True)
            if isinstance(piece, Problem) or piece.text.strip():
                yield piece
            else:
                notes.add("blank documents, left out", document.where)


def _in_vocabulary(row: TokenRow, vocab_size: int) -> TokenRow | Problem:
    wrong = next((i for i, token in enumerate(row.ids) if not 0 <= token < vocab_size), None)
    if wrong is None:
        return row
    return Problem(
        f"{row.where}: token id {row.ids[wrong]} at position {wrong} is not in the vocabulary (0 to {vocab_size - 1})",
        "make the rows with this model's own tokenizer",
    )


def _rendered(chat: Chat, tokenizer: PreTrainedTokenizerBase, notes: Notes) -> Piece | Problem:
    rendered = render(chat, tokenizer)
    if isinstance(rendered, Problem):
        return rendered
    if not rendered.by_template:
        notes.add("the tokenizer has no chat template, chats joined as `role: content` lines", chat.where)
        return Piece(rendered.text, chat.where, special=True)
    notes.templated += 1
    if rendered.folded:
        notes.add("system messages put into the user's, as the chat template takes none", chat.where)
    closed = tokenizer.eos_token is not None and rendered.text.rstrip().endswith(str(tokenizer.eos_token))
    return Piece(rendered.text, chat.where, special=False, closed=closed)


def refuse_problems(items: Iterator[Piece | TokenRow | Problem]) -> Iterator[Piece | TokenRow]:
    """The user's own data: the first malformed record ends the reading, with those that follow it soon.

    Raises:
        UserError: up to `PROBLEMS_LISTED` problems.
    """
    for item in items:
        if isinstance(item, Problem):
            ahead = itertools.islice(items, PROBLEM_LOOKAHEAD)
            following = itertools.islice((other for other in ahead if isinstance(other, Problem)), PROBLEMS_LISTED - 1)
            raise UserError(item, *following)
        yield item


def skip_problems(items: Iterator[Piece | TokenRow | Problem], name: str, notes: Notes) -> Iterator[Piece | TokenRow]:
    """The public data set `name`: records that cannot be used are skipped and noted.

    Raises:
        UserError: when `SKIPPED_IN_A_ROW` of them follow each other.
    """
    in_a_row = 0
    for item in items:
        if not isinstance(item, Problem):
            in_a_row = 0
            yield item
            continue
        in_a_row += 1
        notes.add("records that cannot be used, skipped", item.what)
        if in_a_row == SKIPPED_IN_A_ROW:
            what = f"--dataset {name}: {in_a_row} records one after the other cannot be used ({item.what})"
            raise UserError(Problem(what, "use another data set, or a local file"))
