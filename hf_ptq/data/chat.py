"""Chats as text: the tokenizer's chat template where there is one, a plain join where there is none.

A rendered chat holds the template's own control tokens, BOS included, so it is tokenized without special tokens (or
BOS would stand twice). Whether EOS has to be added is seen in the text: most templates close the last message with it.
A plain join (`role: content`, a line each) is ordinary text and is tokenized as such.

Some templates refuse a system message (Gemma's): it is then put in front of the first user message, and the caller
learns so. Any other refusal is the caller's to report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_ptq.data.records import Chat
from hf_ptq.errors import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Rendered:
    """A chat as text.

    Attributes:
        text: what is tokenized.
        by_template: rendered by the template: no special tokens are to be added.
        folded: the system message was put into the first user message.
    """

    text: str
    by_template: bool
    folded: bool = False


def render(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> Rendered | Problem:
    """`chat` as the text that the model would be shown, or why its template refuses it."""
    if tokenizer.chat_template is None:
        return Rendered("\n".join(f"{message['role']}: {message['content']}" for message in chat.messages), False)
    text = _by_template(chat.messages, chat.tools, tokenizer)
    if not isinstance(text, str):
        folded = fold_system(chat.messages)
        retried = _by_template(folded, chat.tools, tokenizer) if folded != chat.messages else text
        if isinstance(retried, str):
            return Rendered(retried, True, folded=True)
        return Problem(f"{chat.where}: the model's chat template refuses it ({str(text).splitlines()[0]})")
    return Rendered(text, True)


def fold_system(messages: Messages) -> Messages:
    """The same chat without a system message of its own: it opens the first user message (nothing if it is blank)."""
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
        return messages
    system, user, *rest = messages
    opening = f"{system['content']}\n\n" if system["content"].strip() else ""
    return ({**user, "content": opening + user["content"]}, *rest)


def _by_template(messages: Messages, tools: tuple[Any, ...], tokenizer: PreTrainedTokenizerBase) -> str | Exception:
    """The rendered text, or what the template raised: it is a program of the model's author, in a sandbox."""
    import jinja2

    conversation: list[Mapping[str, Any]] = list(messages)
    try:
        # transformers 5 would return a BatchEncoding of ids otherwise.
        text = tokenizer.apply_chat_template(conversation, tools=list(tools) or None, tokenize=False)  # pyright: ignore
    except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return error
    return str(text)
