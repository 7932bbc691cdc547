"""Chats: rendered with the template or joined, BOS and EOS once, what a template refuses."""

from __future__ import annotations

import pytest
from data_tools import BOS, EOS, Heard, ids, jsonl, make_tokenizer, w

from hf_ptq.data import datasets as named
from hf_ptq.data.rows import read_calibration
from hf_ptq.errors import UserError

CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}"
WITH_BOS = "<s>{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
)
ALTERNATING = "{% if messages[0].role != 'user' %}{{ raise_exception('must begin with user') }}{% endif %}" + CHATML


@pytest.fixture
def heard():
    return Heard()


CHAT = {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]}


def chat_ids(tmp_path, heard, tokenizer, *records) -> list[int]:
    data = read_calibration([jsonl(tmp_path / "c.jsonl", *records)], [], 512, tokenizer, heard.report)
    return ids(data)[0]


def test_a_chat_is_rendered_by_the_template_and_bos_stands_once(tmp_path, heard):
    tokenizer = make_tokenizer("<s> $A", WITH_BOS)
    row = chat_ids(tmp_path, heard, tokenizer, CHAT)
    assert row == [*tokenizer("<s>user=w1;assistant=w2;", add_special_tokens=False)["input_ids"], EOS]  # pyright: ignore
    assert row.count(BOS) == 1
    assert "1 chats, rendered with the model's chat template" in heard.lines
    plain = chat_ids(tmp_path, heard, tokenizer, {"text": "w1 w2"})
    assert plain == [BOS, *w(1, 2), EOS]


def test_a_template_that_closes_with_eos_gets_no_second_one(tmp_path, heard):
    tokenizer = make_tokenizer("<s> $A", CHATML)
    row = chat_ids(tmp_path, heard, tokenizer, CHAT, CHAT)
    assert row == tokenizer("<|user|>w1</s>\n<|assistant|>w2</s>\n" * 2, add_special_tokens=False)["input_ids"]
    assert row.count(EOS) == 4


def test_sharegpt_gives_the_same_ids(tmp_path, heard):
    tokenizer = make_tokenizer(template=CHATML)
    sharegpt = {"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]}
    assert chat_ids(tmp_path, heard, tokenizer, sharegpt) == chat_ids(tmp_path, heard, tokenizer, CHAT)


def test_without_a_template_chats_are_joined_and_that_is_announced(tmp_path, heard):
    tokenizer = make_tokenizer("<s> $A")
    row = chat_ids(tmp_path, heard, tokenizer, CHAT, CHAT)
    one = [*tokenizer("user: w1\nassistant: w2")["input_ids"], EOS]  # pyright: ignore
    assert row == one * 2
    assert one[0] == BOS
    assert "the tokenizer has no chat template, chats joined as `role: content` lines: 2 (first:" in heard.warnings


def test_a_template_without_a_system_role_gets_it_in_the_users_message(tmp_path, heard):
    tokenizer = make_tokenizer(template=NO_SYSTEM)
    with_system = {"messages": [{"role": "system", "content": "w9"}, *CHAT["messages"]]}
    row = chat_ids(tmp_path, heard, tokenizer, with_system)
    expected = tokenizer("<|user|>w9\n\nw1</s>\n<|assistant|>w2</s>\n", add_special_tokens=False)["input_ids"]
    assert row == expected
    assert "system messages put into the user's, as the chat template takes none: 1" in heard.warnings
    blank = {"messages": [{"role": "system", "content": ""}, *CHAT["messages"]]}
    assert chat_ids(tmp_path, heard, tokenizer, blank) == chat_ids(tmp_path, heard, tokenizer, CHAT)


def test_a_local_chat_that_the_template_refuses_is_named(tmp_path, heard):
    file = jsonl(tmp_path / "a.jsonl", CHAT, {"messages": CHAT["messages"][1:]})
    with pytest.raises(UserError) as error:
        read_calibration([file], [2], 512, make_tokenizer(template=ALTERNATING), heard.report)
    assert f"{file}, line 2: the model's chat template refuses it (must begin with user)" in str(error.value)


def test_a_public_chat_that_the_template_refuses_is_skipped_and_counted(heard, monkeypatch):
    records = [CHAT, {"messages": CHAT["messages"][1:]}, {"messages": []}, CHAT]
    monkeypatch.setattr(named, "load_stream", lambda *_: iter(records))
    tokenizer = make_tokenizer(template=ALTERNATING)
    data = read_calibration(["ultrachat"], [1], 512, tokenizer, heard.report)
    assert data.uses[0].documents == 2
    assert "ultrachat: records that cannot be used, skipped: 2 (first: ultrachat, record 2: the mo" in heard.warnings
