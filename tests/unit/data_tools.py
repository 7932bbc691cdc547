"""What the tests of calibration data share: a tokenizer of words, a report that can be looked at, files of records."""

from __future__ import annotations

import io
import json
from pathlib import Path

import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_ptq.data.rows import CalibrationData
from hf_ptq.report import Report

PAD, BOS, EOS, UNKNOWN = 0, 1, 2, 3


def make_tokenizer(special: str = "", template: str | None = None, eos: bool = True) -> PreTrainedTokenizerFast:
    """Words of "w0" ... "w99" and single characters to ids; `special`: how text is wrapped ("<s> $A </s>")."""
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(100)), *map(chr, range(33, 127))]
    tok = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [  # pyright: ignore
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Punctuation("isolated"),
        ]
    )
    tok.decoder = decoders.Fuse()  # pyright: ignore
    if special:
        tok.post_processor = processors.TemplateProcessing(  # pyright: ignore
            single=special, special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
    names = {"bos_token": "<s>", "eos_token": "</s>"} if eos else {}
    made = PreTrainedTokenizerFast(tokenizer_object=tok, unk_token="<unk>", model_max_length=8, **names)
    made.chat_template = template
    return made


def w(*numbers: int) -> list[int]:
    """The ids of the words w0, w1, ..."""
    return [4 + number for number in numbers]


def words(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


def jsonl(path: Path, *records) -> str:
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return str(path)


class Heard:
    """A report whose warnings and lines can be looked at."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.report = Report(Console(file=self.stream, width=1000))

    @property
    def warnings(self) -> str:
        return "\n".join(self.report.warnings)

    @property
    def lines(self) -> str:
        return self.stream.getvalue()


def ids(data: CalibrationData) -> list[list[int]]:
    assert all(row.dtype == torch.int64 and row.dim() == 1 and row.device.type == "cpu" for row in data.rows)
    return [row.tolist() for row in data.rows]
