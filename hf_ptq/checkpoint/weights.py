"""Which files of a directory are its weights, and whether they fit together.

With `model.safetensors.index.json` the files it names are the weights, and no others; else `model.safetensors`; else
every *.safetensors at the top level, `consolidated*` (the same weights in Mistral's own layout) apart. Names come
from a stranger: one that would leave the directory is refused by its spelling. Where the file lies in the end is not
asked, since in the hub's cache every file is a symbolic link to `../../blobs`.

`find_weights` opens no weight file and costs a directory listing and one JSON; `read_weights` reads every header. For
both, a file may be elsewhere as long as its beginning is here (`Beginning`).
"""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from hf_ptq.checkpoint.headers import Beginning, TensorEntry, read_header, some
from hf_ptq.errors import Problem

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
HEADER_THREADS = 16  # a header is a round trip or two on a network file system

PICKLED = (".bin", ".pt", ".pth", ".ckpt")
TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece")
NOTHING: Mapping[str, Beginning] = {}
NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state")  # of a training run, pickled too


@dataclass(frozen=True)
class FoundWeights:
    """The weight files by name, before any was opened; `weight_map` is the index's, if there is one."""

    files: tuple[str, ...]
    weight_map: Mapping[str, str] | None
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReadWeights:
    """Every tensor by name, in the order of files and of bytes within them."""

    tensors: dict[str, TensorEntry]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]


def conversion_command(model: str, with_tokenizer: bool = True) -> str:
    """A line for the shell that writes `model` (directory or hub id) as safetensors into the current directory."""
    path = Path(model).resolve() if Path(model).is_dir() else Path(model)
    code = (
        f"import transformers as t; s, d = {json.dumps(model)}, {json.dumps(path.name + '-safetensors')}; "
        't.AutoModelForCausalLM.from_pretrained(s, dtype="auto").save_pretrained(d)'
    )
    if with_tokenizer:
        code += "; t.AutoTokenizer.from_pretrained(s).save_pretrained(d)"
    return shlex.join(["python", "-c", code])


def safe_name(name: str) -> bool:
    """Whether `name` stays inside the directory it is joined to, whatever the operating system."""
    path = PurePosixPath(name)
    plain = bool(name) and "\\" not in name and "\0" not in name and not PureWindowsPath(name).drive
    return plain and not path.is_absolute() and ".." not in path.parts


def is_plain_weights(name: str) -> bool:
    """Whether a file at the top level of a checkpoint holds weights, by its name alone."""
    return name.endswith(".safetensors") and not name.startswith("consolidated") and "/" not in name


def find_weights(
    directory: Path, model: str, elsewhere: Mapping[str, Beginning] = NOTHING, cure: str = ""
) -> FoundWeights:
    """The weight files of `directory`; `model` is what the user asked for, named in the messages.

    `elsewhere`: files that count as being in the directory, by their names relative to it. `cure`: of missing files,
    where more is known than that the directory lacks them.
    """
    here = {path.name for path in directory.iterdir()} | set(elsewhere)
    top_level = sorted(filter(is_plain_weights, here))
    if INDEX_FILE in here:
        return _indexed(directory, top_level, elsewhere, cure)
    if SINGLE_FILE in here:
        unread = [name for name in top_level if name != SINGLE_FILE]
        return FoundWeights((SINGLE_FILE,), None, notes=_unread_note(unread, SINGLE_FILE))
    if top_level:
        return FoundWeights(tuple(top_level), None)
    return FoundWeights((), None, (_no_weights(directory, model, here, cure),))


def _unread_note(unread: Sequence[str], chosen: str) -> tuple[str, ...]:
    return (f"not read, since {chosen} decides: {some(unread)}",) if unread else ()


def _no_weights(directory: Path, model: str, here: set[str], cure: str) -> Problem:
    pickled = sorted(name for name in here if name.endswith(PICKLED) and not name.startswith(NOT_WEIGHTS))
    if pickled:
        with_tokenizer = any(name.startswith(TOKENIZER_FILES) for name in here)
        return Problem(
            f"{directory} has no *.safetensors, only pickled weights, which are not read: {some(pickled)}",
            f"convert it: {conversion_command(model, with_tokenizer)}",
        )
    gguf = sorted(name for name in here if name.endswith(".gguf"))
    if gguf:
        return Problem(f"{directory} has no *.safetensors", f"name the GGUF file itself: {directory / gguf[0]}")
    return Problem(f"{directory} has no weights: neither {INDEX_FILE} nor *.safetensors", cure)


def read_weight_map(index: Path) -> Mapping[str, str] | Problem:
    """Tensor name -> file name, as the index says, unchecked."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return Problem(f"{index}: cannot be read ({error})", "fetch it again")
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if isinstance(weight_map, dict) and weight_map and all(isinstance(file, str) for file in weight_map.values()):
        return weight_map
    return Problem(f"{index}: has no weight_map from tensors to files", "fetch it again")


def _indexed(directory: Path, top_level: Sequence[str], elsewhere: Mapping[str, Beginning], cure: str) -> FoundWeights:
    index = directory / INDEX_FILE
    weight_map = read_weight_map(index)
    if isinstance(weight_map, Problem):
        return FoundWeights((), None, (weight_map,))
    named = sorted(set(weight_map.values()))
    unsafe = [name for name in named if not safe_name(name)]
    foreign = [name for name in named if safe_name(name) and not name.endswith(".safetensors")]
    good = [name for name in named if name not in unsafe and name not in foreign]
    missing = [name for name in good if not (directory / name).is_file() and name not in elsewhere]
    problems = []
    if unsafe:
        problems.append(Problem(f"{index}: names files outside its directory: {some(map(repr, unsafe))}"))
    if foreign:
        problems.append(Problem(f"{index}: names files that are not safetensors: {some(foreign)}"))
    if missing:
        what = f"{index}: {len(missing)} of the {len(named)} files it names are missing: {some(missing)}"
        problems.append(Problem(what, cure or "complete the download"))
    unread = [name for name in top_level if name not in good]
    return FoundWeights(tuple(good), weight_map, tuple(problems), _unread_note(unread, INDEX_FILE))


def read_weights(directory: Path, found: FoundWeights, elsewhere: Mapping[str, Beginning] = NOTHING) -> ReadWeights:
    """Read the headers of all `found.files`. Files that `found.problems` calls missing are passed over."""
    there = {name for name in found.files if found.weight_map is None or (directory / name).is_file()}
    files = [name for name in found.files if name in there or name in elsewhere]
    with ThreadPoolExecutor(HEADER_THREADS) as pool:
        headers = list(pool.map(lambda file: read_header(directory, file, elsewhere.get(file)), files))
    problems = [problem for _, problem in headers if problem]
    whole = {file for file, (_, problem) in zip(files, headers, strict=True) if not problem}
    entries = [entry for entries, _ in headers for entry in entries]
    tensors = {entry.name: entry for entry in reversed(entries)}
    problems += _twice(directory, entries, tensors)
    if whole and not entries:
        problems.append(Problem(f"{directory}: no tensor in {some(whole)}"))
    notes: list[str] = []
    if found.weight_map is not None:
        more, notes = _compare_index(directory, found.weight_map, entries, whole)
        problems += more
    return ReadWeights({entry.name: entry for entry in entries}, tuple(problems), tuple(notes))


def _twice(directory: Path, entries: Sequence[TensorEntry], first: Mapping[str, TensorEntry]) -> list[Problem]:
    """Tensors held by two files, one problem for each pair of files; `first` is where each name occurs first."""
    pairs: dict[tuple[str, str], list[str]] = defaultdict(list)
    for entry in entries:
        if first[entry.name] is not entry:
            pairs[first[entry.name].file, entry.file].append(entry.name)
    cure = f"remove one of the files, or keep an {INDEX_FILE} that names one of them"
    return [Problem(f"{directory}: {a} and {b} both hold {some(names)}", cure) for (a, b), names in pairs.items()]


def _compare_index(
    directory: Path, weight_map: Mapping[str, str], entries: Sequence[TensorEntry], whole: set[str]
) -> tuple[list[Problem], list[str]]:
    """Tensors that are not where the index says (a problem), tensors that the index does not list (a note).

    `whole`: the files whose headers were read; nothing is said about tensors in others.
    """
    places = {(entry.name, entry.file) for entry in entries}
    absent = [f"{name} in {file}" for name, file in weight_map.items() if file in whole and (name, file) not in places]
    what = f"{directory / INDEX_FILE}: {len(absent)} tensors are not in the file it names for them: {some(absent)}"
    cure = "fetch the index and the weights of one and the same revision"
    unlisted = [entry.name for entry in entries if entry.name not in weight_map]
    note = f"{len(unlisted)} tensors of the weight files are not in {INDEX_FILE}; they are read too: {some(unlisted)}"
    return [Problem(what, cure)] if absent else [], [note] if unlisted else []
