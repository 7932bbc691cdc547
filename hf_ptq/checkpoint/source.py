"""Where a model comes from: whatever was asked for becomes one directory whose headers are read and checked.

    directory            as it is
    owner/name           one commit of a hub repository, in the hub's cache (hub.py)
    FILE.gguf, demo      converted once, in our own cache (gguf.py)

`check_source_cheaply` says within milliseconds what is wrong without a network and without torch; `open_source` says
everything, all problems at once. No weight is read by either, nor downloaded: of a hub repository only the headers are
fetched, and `download` gets the files once the run is known to be possible. (A GGUF file is converted, whole, when it
is opened: its header does not tell what the checkpoint made of it will hold.)

What this file does not know: how a tensor's bytes are used, and which module they belong to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ptq.checkpoint.gguf import convert_gguf, demo_gguf_path, gguf_problems
from hf_ptq.checkpoint.headers import Beginning, TensorEntry, some
from hf_ptq.checkpoint.hub import (
    cache_problems,
    fetch_headers,
    fetch_small_files,
    fetch_weights,
    is_hub_id,
    room_for_download,
)
from hf_ptq.checkpoint.room import Need
from hf_ptq.checkpoint.weights import NOTHING, FoundWeights, ReadWeights, find_weights, read_weights
from hf_ptq.errors import Problem, RunError, UserError, refuse_if_any

if TYPE_CHECKING:
    from hf_ptq.report import Report

__all__ = ["Source", "TensorEntry", "check_source_cheaply", "download", "downloaded", "open_source"]

DEMO = "demo"
KINDS = "a directory with config.json and *.safetensors, a hub id like Qwen/Qwen3-0.6B, a .gguf file, or demo"
QUANTIZATION_KEYS = ("quantization_config", "compression_config")


# Device, inode, size and time of change: what differs when a file is replaced or written to.
FileIdentity = tuple[int, int, int, int]


def file_identity(path: Path) -> FileIdentity | None:
    """The identity of a file; None where it is gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True)
class Source:
    """A checkpoint whose every header was read and found whole."""

    directory: Path
    origin: str  # as asked for
    commit: str | None  # of the hub repository, where it is known
    config: dict[str, Any]  # config.json
    tensors: dict[str, TensorEntry]  # in the order of the files, and of the bytes within a file
    weight_files: tuple[str, ...]  # relative to the directory
    as_found: dict[str, FileIdentity | None] = field(default_factory=dict)  # of weight files, before headers were read
    elsewhere: Mapping[str, Beginning] = field(default_factory=dict)  # weight files that are on the hub only

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.num_bytes for entry in self.tensors.values())

    @property
    def download_bytes(self) -> int:
        """Bytes of the weight files that are on the hub only."""
        return sum(beginning.file_bytes for beginning in self.elsewhere.values())

    def download_problems(self) -> list[Problem]:
        """Why its weights cannot be written where they would be downloaded to; for the rank that downloads them."""
        return cache_problems(self.origin, self.directory) if self.elsewhere else []

    def needs(self) -> list[Need]:
        """What has to be free on the disk before its weights are here."""
        return [room_for_download(self.origin, self.directory, self.elsewhere)] if self.elsewhere else []


def check_source_cheaply(model: str) -> list[Problem]:
    """Problems with `model` that show without network, torch or opening a weight file; none for a hub id."""
    path = Path(model).expanduser()
    if model == DEMO and not path.is_dir():
        try:
            return gguf_problems(demo_gguf_path())
        except UserError as error:
            return list(error.problems)
    if path.suffix == ".gguf":
        return gguf_problems(path)
    if path.is_dir():
        problems = _read_config(path)[1]
        return problems + (list(find_weights(path, model).problems) if _is_checkpoint(path) else [])
    if path.exists():
        return [Problem(f"{model} is a file, no checkpoint", f"give {KINDS}")]
    return [] if is_hub_id(model) else [Problem(f"{model!r} does not exist, and cannot be a hub id", f"give {KINDS}")]


def open_source(
    model: str,
    revision: str | None,
    trust_remote_code: bool,
    report: Report,
    elsewhere: Mapping[str, Beginning] = NOTHING,
) -> Source:
    """Resolve `model`, fetch what is small or convert it if needed, and read and check every header.

    `revision` is a branch, tag or commit and means something for hub ids only; `elsewhere` are files that a directory
    will get by a download. Raises `UserError` with all problems.
    """
    path = Path(model).expanduser()
    if not path.is_dir():
        refuse_if_any(check_source_cheaply(model))
    directory, commit = _resolve(model, path, revision, report)
    config, problems = _read_config(directory)
    found, read, cure = FoundWeights((), None), ReadWeights({}, (), ()), ""
    as_found: dict[str, FileIdentity | None] = {}
    if _is_checkpoint(directory):
        if not path.is_dir() and commit is not None:
            on_hub = fetch_headers(model, commit, directory)
            elsewhere, cure = on_hub.beginnings, on_hub.cure
        found = find_weights(directory, model, elsewhere, cure)
        as_found = {file: file_identity(directory / file) for file in found.files}
        read = read_weights(directory, found, elsewhere)
        problems += [*found.problems, *read.problems]
    if config:
        problems += _code_problems(directory, config, trust_remote_code)
    refuse_if_any(problems)
    for note in (*found.notes, *read.notes):
        report.warn(f"{directory}: {note}")
    return Source(directory, model, commit, config, read.tensors, found.files, as_found, elsewhere)


def download(source: Source) -> None:
    """Fetch the weight files that are on the hub only, of the commit that was opened; nothing for other sources.

    Raises `UserError` where the cache cannot be written to, the disk has no room or the hub does not give them,
    `RunError` where it fails.
    """
    if source.elsewhere:
        assert source.commit is not None, "only a commit of the hub has files elsewhere"
        fetch_weights(source.origin, source.commit, source.directory, source.elsewhere)


def downloaded(source: Source) -> Source:
    """The source after its download. Raises `RunError` unless the headers on the disk are those it was opened with."""
    if not source.elsewhere:
        return source
    found = find_weights(source.directory, source.origin)
    as_found = {file: file_identity(source.directory / file) for file in found.files}
    read = read_weights(source.directory, found)
    problems, other = [*found.problems, *read.problems], _differing_files(source.tensors, read.tensors)
    if problems or other:
        reasons = some((problem.what for problem in problems), separator="; ") if problems else some(other)
        what = f"{source.origin}: what was downloaded is not what the hub's headers said: {reasons}"
        # In the hub's cache a file is a link: were only that removed, it would be made again.
        contents = [str((source.directory / file).resolve()) for file in other or sorted(source.elsewhere)]
        raise RunError(Problem(what, f"remove {', '.join(contents)}, and run again"))
    return replace(source, as_found=as_found, elsewhere={})


def _differing_files(planned: Mapping[str, TensorEntry], there: Mapping[str, TensorEntry]) -> list[str]:
    """Files that hold a tensor which is not in both, or not in the same place, dtype and shape."""
    entries = {entry for name in planned.keys() | there.keys() for entry in (planned.get(name), there.get(name))}
    both = {entry for name, entry in planned.items() if there.get(name) == entry}
    return sorted({entry.file for entry in entries - both if entry is not None})


def _resolve(model: str, path: Path, revision: str | None, report: Report) -> tuple[Path, str | None]:
    """The directory that holds the checkpoint, and its commit."""
    local = path.is_dir() or model == DEMO or path.suffix == ".gguf"
    if local and revision is not None:
        report.warn(f"--revision {revision} is for hub ids and changes nothing for {model}")
    if path.is_dir():
        return path, _commit_of(path)
    if local:
        return convert_gguf(demo_gguf_path() if model == DEMO else path, report), None
    directory, commit = fetch_small_files(model, revision)
    report.say(f"{model}: commit {commit} in {directory}")
    return directory, commit


def _commit_of(directory: Path) -> str | None:
    """The commit of a directory of the hub's cache, which is called snapshots/COMMIT."""
    place = directory.resolve()
    return place.name if place.parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", place.name) else None


def _is_checkpoint(directory: Path) -> bool:
    return (directory / "config.json").is_file()


def _read_json(path: Path) -> dict[str, Any] | Problem:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return Problem(f"{path}: cannot be read ({error})")
    return content if isinstance(content, dict) else Problem(f"{path}: is no JSON object")


def _read_config(directory: Path) -> tuple[dict[str, Any], list[Problem]]:
    """config.json, and what speaks against it that needs no library to see."""
    if not _is_checkpoint(directory):
        return {}, [Problem(f"{directory} is no checkpoint: it has no config.json", f"give {KINDS}")]
    config = _read_json(directory / "config.json")
    if isinstance(config, Problem):
        return {}, [config]
    return config, _quantized_problems(directory, config)


def _quantized_problems(directory: Path, config: dict[str, Any]) -> list[Problem]:
    cure = "give the checkpoint it was made from"
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in QUANTIZATION_KEYS:
            if settings := part.get(key):
                settings = settings if isinstance(settings, dict) else {}
                method = settings.get("quant_method") or settings.get("quant_algo") or "unnamed"
                what = f"{directory / 'config.json'}: quantized sources are not read yet ({key}: {method})"
                return [Problem(what, cure)]
    if (directory / "hf_quant_config.json").exists():
        what = f"{directory}: quantized sources are not read yet (hf_quant_config.json: modelopt)"
        return [Problem(what, cure)]
    return []


def _code_problems(directory: Path, config: dict[str, Any], trust_remote_code: bool) -> list[Problem]:
    """A model that transformers cannot build by itself: with code of its own it needs the flag, without it is refused.

    `auto_map` alone does not decide: many models carry code from before transformers learnt them, and are built
    without it.
    """
    import transformers

    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return [Problem(f"{directory / 'config.json'}: has no model_type")]
    if _is_native(model_type):
        return []
    code = config.get("auto_map")
    if not code and model_type in transformers.CONFIG_MAPPING:
        return []  # whether such a model can be quantized is said where it is built
    if not code:
        what = f"{directory}: transformers {transformers.__version__} does not know the model_type {model_type!r}"
        return [Problem(what + ", and the checkpoint brings no code for it")]
    if trust_remote_code:
        return []
    what = f"{directory}: the model_type {model_type!r} needs code that comes with the checkpoint: {_code_names(code)}"
    return [Problem(what, "read that code; if you trust it, add --trust_remote_code")]


def _code_names(auto_map: object) -> str:
    names = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    return ", ".join(sorted({str(name) for name in names}))


def _is_native(model_type: str) -> bool:
    """Whether transformers itself has a language model (with or without eyes) of this type."""
    import transformers

    if model_type not in transformers.CONFIG_MAPPING:
        return False
    config_class = transformers.CONFIG_MAPPING[model_type]
    return (
        config_class in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        or config_class in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    )
