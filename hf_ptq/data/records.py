"""One record of a data set, and the document it stands for.

Whatever calibration data comes from (a hub data set, a file of any kind), it arrives here as *records*: mappings from
field names to values. A record becomes one of three documents: text, a chat, or a row of token ids. The first field of
`FIELDS` that a record has (and that is not null) decides; `RECORD_SCHEMA` is the same rule in words for the user.

A record that fits none is returned as a `Problem` that says where it stands and what is wrong with it: the reader of a
user's file refuses with it, the reader of a public data set skips it and counts.

This file does not know where records come from, and knows no tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_ptq.errors import Problem

RECORD_SCHEMA = """\
A record has one of these (the first one that is there and not null counts):
  input_ids             a list of token ids, used as one row as it is (attention_mask: its zeros are left out)
  messages              a chat: a list of {"role": ..., "content": ...}, rendered with the model's chat template
  conversations         the same as {"from": "human" | "gpt" | "system" | "tool", "value": ...} (ShareGPT)
  text                  a string
  prompt, completion    two strings, joined (or two lists of chat messages)
Files: .jsonl (a record a line), .json (a list of records, or a record a line), .csv and .parquet (a record a row),
.txt (the whole file is one text), .safetensors (input_ids: [rows, tokens] of int64 or int32),
or a folder: all files of these kinds in it, sorted by name."""

FIELD_NAMES = "input_ids, messages, conversations, text, or prompt and completion"

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


@dataclass(frozen=True)
class Text:
    """A piece of text; `where` names its place for messages ("FILE, line 3")."""

    text: str
    where: str


@dataclass(frozen=True)
class Chat:
    """A conversation: mappings with `role` and `content` (str), and the tools on offer, if any."""

    messages: tuple[dict[str, Any], ...]
    where: str
    tools: tuple[Any, ...] = ()


@dataclass(frozen=True)
class TokenRow:
    """A finished row of token ids; `padding` positions that its attention mask hid are left out already."""

    ids: tuple[int, ...]
    where: str
    padding: int = 0


Document = Text | Chat | TokenRow


class MalformedRecordError(ValueError):
    """What is wrong with a record, without its place."""


def read_record(record: Any, where: str) -> Document | Problem:
    """The document that `record` stands for, or what is wrong with it.

    Args:
        record: any value; a mapping with one of the fields of `RECORD_SCHEMA` is right.
        where: the record's place, for messages.

    Returns:
        Text (perhaps blank), Chat, TokenRow (never empty), or a Problem that names `where` and the field.
    """
    if not isinstance(record, Mapping):
        return Problem(f"{where}: a record has named fields, this is of type {_kind(record)}", f"give it {FIELD_NAMES}")
    present = {key: value for key, value in record.items() if value is not None}
    for field, read in FIELDS.items():
        if field not in present:
            continue
        try:
            return read(present, where)
        except MalformedRecordError as error:
            return Problem(f"{where}: {error}")
    found = ", ".join(str(key) for key in list(record)[:8]) or "none"
    return Problem(f"{where}: no field that can be used (found: {found})", f"give it {FIELD_NAMES}")


def _token_row(record: Mapping[str, Any], where: str) -> TokenRow:
    ids = record["input_ids"]
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise MalformedRecordError(f"`input_ids` is a list of integers, not {_kind(ids)}")
    wrong = next((i for i, token in enumerate(ids) if not isinstance(token, int) or isinstance(token, bool)), None)
    if wrong is not None:
        raise MalformedRecordError(f"`input_ids` is a list of integers, not {_kind(ids[wrong])} (position {wrong})")
    mask = record.get("attention_mask", [1] * len(ids))
    if not isinstance(mask, Sequence) or len(mask) != len(ids) or any(bit not in (0, 1) for bit in mask):
        raise MalformedRecordError(f"`attention_mask` is a list of {len(ids)} zeros and ones, one for each token id")
    kept = tuple(token for token, bit in zip(ids, mask, strict=True) if bit)
    if not kept:
        raise MalformedRecordError("`input_ids` is empty" if not ids else "`attention_mask` hides every token")
    return TokenRow(kept, where, len(ids) - len(kept))


def _chat(field: str) -> Callable[[Mapping[str, Any], str], Chat]:
    """A reader of the chat in `field`."""

    def read(record: Mapping[str, Any], where: str) -> Chat:
        tools = record.get("tools", ())
        tools = tuple(tools) if isinstance(tools, list | tuple) else ()  # null or text where a record has none
        return Chat(_messages(record[field], field), where, tools)

    return read


def _messages(value: Any, field: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise MalformedRecordError(f"`{field}` is a list of messages, not {_kind(value)}")
    if not value:
        raise MalformedRecordError(f"`{field}` is empty")
    return tuple(_message(message, f"`{field}`, message {i}") for i, message in enumerate(value, 1))


def _message(message: Any, what: str) -> dict[str, Any]:
    """A message as {"role", "content", ...}, ShareGPT's spelling translated, null entries left out."""
    if not isinstance(message, Mapping):
        raise MalformedRecordError(f"{what} is an object with role and content, not {_kind(message)}")
    message = {key: value for key, value in message.items() if value is not None}
    if "role" in message:
        role, content = message["role"], message.get("content")
    elif "from" in message:
        role, content = message["from"], message.get("value")
        if isinstance(role, str) and role not in SHAREGPT_ROLES:
            raise MalformedRecordError(f"{what} is from {role!r}; known are {', '.join(SHAREGPT_ROLES)}")
        role = SHAREGPT_ROLES[role] if isinstance(role, str) else role
        message = {key: value for key, value in message.items() if key not in ("from", "value")}
    else:
        raise MalformedRecordError(f"{what} has no role (found: {', '.join(map(str, message)) or 'nothing'})")
    if not isinstance(role, str):
        raise MalformedRecordError(f"{what}: the role is a string, not {_kind(role)}")
    if content is None and "tool_calls" in message:
        content = ""
    return {**message, "role": role, "content": _content(content, what)}


def _content(content: Any, what: str) -> str:
    """The text of a message; a list of text parts (as vision models have it) is joined."""
    if isinstance(content, list | tuple):
        parts = [part if isinstance(part, Mapping) else {"type": _kind(part)} for part in content]
        other = next((part for part in parts if part.get("type", "text") != "text"), None)
        if other is not None:
            raise MalformedRecordError(f"{what} holds a part of type {other['type']!r}; calibration takes text only")
        content = "".join(_string(part.get("text"), f"{what}: the text of a part") for part in parts)
    return _string(content, f"{what}: the content")


def _text(record: Mapping[str, Any], where: str) -> Text:
    return Text(_string(record["text"], "`text`"), where)


def _prompt_completion(record: Mapping[str, Any], where: str) -> Text | Chat:
    prompt, completion = record["prompt"], record.get("completion")
    if completion is None:
        raise MalformedRecordError("`prompt` has no `completion` beside it")
    if isinstance(prompt, list | tuple) and isinstance(completion, list | tuple):
        return Chat((*_messages(prompt, "prompt"), *_messages(completion, "completion")), where)
    prompt, completion = _string(prompt, "`prompt`"), _string(completion, "`completion`")
    # Many sets put the space between the two into one of them; where neither has it, the words must not grow together.
    apart = re.search(r"\s$", prompt) or re.match(r"\s", completion) or not prompt
    return Text(f"{prompt}{'' if apart else chr(10)}{completion}", where)


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise MalformedRecordError(f"{what} is a string, not {_kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # "\ud800" is legal in JSON and in no tokenizer
        raise MalformedRecordError(f"{what} holds half a surrogate pair at character {error.start}") from None
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


FIELDS: dict[str, Callable[[Mapping[str, Any], str], Document]] = {
    "input_ids": _token_row,
    "messages": _chat("messages"),
    "conversations": _chat("conversations"),
    "text": _text,
    "prompt": _prompt_completion,
}
