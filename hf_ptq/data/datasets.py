"""The data sets known by name, and what `--dataset` and `--calib_size` ask for.

`DATASETS` is plain data: a name, where the hub keeps it, and how its records become records of `records.RECORD_SCHEMA`.
A name that is not in it is a file or a folder. Hub data sets are streamed through the library `datasets`, so only what
is needed is downloaded; several splits take turns, record by record. Offline, `datasets` streams from its own cache if
the set was prepared there once. Nothing is shuffled: the same request reads the same records.

`--calib_size` counts rows. One number is the total, split evenly over the data sets; a list gives each its own.

Neither torch nor `datasets` is imported before something is read.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_ptq.data.local_files import READERS, local_documents, path_problems
from hf_ptq.data.records import Document, read_record
from hf_ptq.errors import Problem, UserError, refuse_if_any

DEFAULT_DATASETS = ("cnn_dailymail", "nemotron-post-training-dataset-v2")
DEFAULT_ROWS = 512
DEMO_MODEL = "demo"
DEMO_DATASETS = ("pydoc",)
DEMO_ROWS = 8

Record = Mapping[str, Any]
Converter = Callable[[Iterable[Record]], Iterator[Record]]


def _each(convert: Callable[[Record], Record]) -> Converter:
    """A converter that looks at one record at a time; a missing field becomes null and is reported as such."""
    return lambda records: (convert(record) for record in records)


def _wikitext_articles(records: Iterable[Record]) -> Iterator[Record]:
    """Whole articles: a record of the set is one line, and ` = Title = ` (one level) begins an article."""
    article = ""
    for record in records:
        line = str(record.get("text") or "")
        if line.startswith(" = ") and not line.startswith(" = = "):
            if article.strip():
                yield {"text": article}
            article = ""
        article += line
    if article.strip():
        yield {"text": article}


def _orca_messages(record: Record) -> Record:
    turns = (("system", "system_prompt"), ("user", "question"), ("assistant", "response"))
    # Half of the system prompts are empty strings: no message then.
    return {"messages": [{"role": r, "content": record.get(f)} for r, f in turns if r != "system" or record.get(f)]}


def _role_and_content(record: Record) -> Record:
    """Chats without the empty columns beside role and content (tool calls) that some splits carry."""
    messages = record.get("messages")
    if not isinstance(messages, list):
        return {"messages": messages}
    keep = ("role", "content")
    return {"messages": [{k: m.get(k) for k in keep} if isinstance(m, Mapping) else m for m in messages]}


_TEXT = _each(lambda record: {"text": record.get("text")})
_CHAT = _each(_role_and_content)


@dataclass(frozen=True)
class DatasetSpec:
    """A data set known by name.

    Attributes:
        description: one line for `--list`.
        path: its id on the hub; "" for text that comes with Python.
        configuration: the name of the hub's configuration (subset), if it has several.
        splits: the splits that are read, in turns.
        convert: records of the set -> records of `RECORD_SCHEMA`.
    """

    description: str
    path: str
    configuration: str | None = None
    splits: tuple[str, ...] = ("train",)
    convert: Converter = _TEXT


DATASETS: dict[str, DatasetSpec] = {
    "pydoc": DatasetSpec("Python's documentation topics; comes with Python, needs no network", ""),
    "cnn_dailymail": DatasetSpec(
        "news articles in English",
        "abisee/cnn_dailymail",
        "3.0.0",
        convert=_each(lambda record: {"text": record.get("article")}),
    ),
    "nemotron-post-training-dataset-v2": DatasetSpec(
        "chats on science, mathematics, code and more (gated: accept its terms on the hub, set HF_TOKEN)",
        "nvidia/Nemotron-Post-Training-Dataset-v2",
        splits=("stem", "chat", "math", "code"),
        convert=_CHAT,
    ),
    "nemotron-post-training-dataset-v1": DatasetSpec(
        "chats on science, mathematics, code and more, with long reasoning",
        "nvidia/Nemotron-Post-Training-Dataset-v1",
        splits=("stem", "chat", "math", "code"),
        convert=_CHAT,
    ),
    "c4": DatasetSpec("web pages in English", "allenai/c4", "en"),
    "wikitext": DatasetSpec(
        "Wikipedia articles (wikitext-103, raw)",
        "Salesforce/wikitext",
        "wikitext-103-raw-v1",
        convert=_wikitext_articles,
    ),
    "wikitext2": DatasetSpec(
        "Wikipedia articles (wikitext-2, raw)",
        "Salesforce/wikitext",
        "wikitext-2-raw-v1",
        convert=_wikitext_articles,
    ),
    "pile": DatasetSpec("web, papers, code, books (the Pile without copyrighted parts)", "monology/pile-uncopyrighted"),
    "pile-10k": DatasetSpec("the first 10,000 texts of the Pile", "NeelNanda/pile-10k"),
    "gsm8k": DatasetSpec(
        "school mathematics, worked out",
        "openai/gsm8k",
        "main",
        convert=_each(lambda record: {"prompt": record.get("question"), "completion": record.get("answer")}),
    ),
    "openorca": DatasetSpec("instructions and answers", "Open-Orca/OpenOrca", convert=_each(_orca_messages)),
    "ultrachat": DatasetSpec(
        "chats of several turns", "HuggingFaceH4/ultrachat_200k", splits=("train_sft",), convert=_CHAT
    ),
    "magpie": DatasetSpec(
        "chats of several turns, synthetic",
        "Magpie-Align/Magpie-Pro-MT-300K-v0.1",
        convert=_each(lambda record: {"conversations": record.get("conversations")}),
    ),
}


# What is asked for


def default_datasets(model: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The data sets and their rows when `--dataset` is not given."""
    if model == DEMO_MODEL:
        return DEMO_DATASETS, (DEMO_ROWS,)
    return DEFAULT_DATASETS, resolve_sizes(DEFAULT_DATASETS, (DEFAULT_ROWS,))


def choose_datasets(
    model: str, datasets: Sequence[str], sizes: Sequence[int]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The request with defaults filled in, as `read_calibration` takes it.

    The sizes stay empty where the general default holds: rows of token ids are then used without a complaint that
    they are fewer. For the demo model the default is `DEMO_ROWS` in all, whatever the data.
    """
    names = tuple(datasets) or default_datasets(model)[0]
    demo = (max(DEMO_ROWS, len(names)),) if model == DEMO_MODEL else ()
    return names, tuple(sizes) or demo


def resolve_sizes(datasets: Sequence[str], sizes: Sequence[int]) -> tuple[int, ...]:
    """Rows of each data set: the list as it is, or one total (512 if none is given) split evenly, the first ones first.

    Raises:
        UserError: the lengths differ, a size is not positive, or the total leaves a data set without a row.
    """
    refuse_if_any(_size_problems(datasets, sizes))
    if len(sizes) == len(datasets):
        return tuple(sizes)
    each, rest = divmod(sizes[0] if sizes else max(DEFAULT_ROWS, len(datasets)), len(datasets))
    return tuple(each + (i < rest) for i in range(len(datasets)))


def _size_problems(datasets: Sequence[str], sizes: Sequence[int]) -> list[Problem]:
    given, listed = ",".join(map(str, sizes)), ",".join(datasets)
    if any(size < 1 for size in sizes):
        return [Problem(f"--calib_size {given}: every size must be at least 1 (it counts rows of --calib_seq tokens)")]
    if not datasets:
        return []
    if len(sizes) > 1 and len(sizes) != len(datasets):
        what = f"--calib_size {given} has {len(sizes)} numbers and --dataset {listed} has {len(datasets)} names"
        return [Problem(what, "give one number for all, or one for each data set")]
    if len(sizes) == 1 and sizes[0] < len(datasets):
        what = f"--calib_size {given} is less than the {len(datasets)} data sets ({listed}) it is split over"
        return [Problem(what, "give at least one row for each data set")]
    return []


def check_datasets_cheaply(datasets: Sequence[str], sizes: Sequence[int]) -> list[Problem]:
    """What can be refused without reading anything: unknown names, missing or unreadable files, sizes that do not fit.

    Which data sets are the default depends on the model, so with empty `datasets` the sizes are not compared with
    their number; pass `choose_datasets(...)` for that.
    """
    problems = [problem for name in datasets if name not in DATASETS for problem in _name_problems(name)]
    return problems + _size_problems(datasets, sizes)


def _name_problems(name: str) -> list[Problem]:
    path = Path(name)
    if name and path.exists():
        return path_problems(path)
    if "/" in name or path.suffix.lower() in READERS:
        return [Problem(f"--dataset {name}: no such file or folder", "check the path, or name a data set of --list")]
    near = difflib.get_close_matches(name.lower(), DATASETS, n=3, cutoff=0.5)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return [Problem(f"--dataset {name}: no data set or file of that name", f"{meant}known: {', '.join(DATASETS)}")]


# Reading


def open_documents(name: str) -> Iterator[Document | Problem]:
    """The documents of a data set or path, lazily; a record that cannot be used comes as a Problem naming its place.

    Raises:
        UserError: at once, when a hub data set cannot be reached; on reading, when its stream breaks.
    """
    spec = DATASETS.get(name)
    if spec is None:
        return local_documents(Path(name))
    if not spec.path:
        return _documents(name, _pydoc_topics())
    streams = [_open_split(name, spec, split) for split in spec.splits]
    labels = [name if len(spec.splits) == 1 else f"{name} ({split})" for split in spec.splits]
    return _in_turns([_documents(label, spec.convert(stream)) for label, stream in zip(labels, streams, strict=True)])


def load_stream(path: str, configuration: str | None, split: str) -> Iterable[Record]:
    """One split of a hub data set, streamed (the only call into the library `datasets`)."""
    import datasets

    return datasets.load_dataset(path, configuration, split=split, streaming=True)


def _open_split(name: str, spec: DatasetSpec, split: str) -> Iterator[Record]:
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]  # of its HTTP library

    failures = (DatasetsError, HTTPError, OSError, RuntimeError, ValueError)
    try:
        stream = load_stream(spec.path, spec.configuration, split)
    except failures as error:
        raise _unreachable(name, spec, error) from error

    def records() -> Iterator[Record]:
        try:
            yield from stream
        except failures as error:
            raise _unreachable(name, spec, error) from error

    return records()


def _unreachable(name: str, spec: DatasetSpec, error: Exception) -> UserError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return UserError(
        Problem(
            f"--dataset {name}: {spec.path} cannot be read from the Hugging Face Hub ({reason})",
            "for a gated data set accept its terms on the hub and set HF_TOKEN; offline (HF_HUB_OFFLINE=1) only what"
            " `datasets` has prepared in its cache can be read; or use a local file, or `--dataset pydoc`",
        )
    )


def _pydoc_topics() -> Iterator[Record]:
    from pydoc_data.topics import topics

    return ({"text": topics[key]} for key in sorted(topics))


def _documents(label: str, records: Iterable[Record]) -> Iterator[Document | Problem]:
    return (read_record(record, f"{label}, record {number}") for number, record in enumerate(records, 1))


def _in_turns(streams: Sequence[Iterator[Document | Problem]]) -> Iterator[Document | Problem]:
    """One of each stream, again and again; a stream that has ended is left out."""
    while streams:
        still_open = []
        for stream in streams:
            for document in stream:
                yield document
                still_open.append(stream)
                break
        streams = still_open
