"""Side files of a source, byte for byte: tokenizer, chat template, generation config, processor, remote code, licence.

What is a sidecar: every file that is not weights (in any framework's format), not an index of weights, not
config.json, and not what an earlier quantization left (its configuration, report or recipe). Subfolders are searched
too, except `original/` (weights in a vendor's own layout), `__pycache__` and hidden ones; hidden files are the
business of git and of file managers. Nothing is parsed or written anew: a tokenizer that passes through a library
comes out changed.

Safety: names come from listing the source, so they cannot climb out of the export; what they link to is read only if
it lies in the source itself or, for a snapshot of the hub's cache, in that repository's blobs, where all its files
really are. A file that cannot be copied is a warning that names it, never a failed run: the weights are right without
it, and the user can add it. A failure to write does end the run.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from hf_ptq.checkpoint.source import Source
from hf_ptq.errors import RunError
from hf_ptq.report import REPORT_FILE, Report

_WEIGHTS = r"safetensors|bin|pt|pth|gguf|onnx|onnx_data|h5|msgpack|ot|ckpt|mlmodel"
WEIGHT_FILE = re.compile(rf".+\.({_WEIGHTS})|consolidated.*|.+\.({_WEIGHTS})\.index(\..+)?\.json", re.IGNORECASE)
NOT_AT_THE_TOP = frozenset({  # elsewhere these names may mean something else, as in sentence-transformers' folders
    "config.json", "hf_quant_config.json", REPORT_FILE, "quantize_config.json", "quantization_config.json",
    "quant_config.json", "recipe.yaml", "recipe.yml",
})  # fmt: skip
VENDORS_WEIGHTS = "original"
CHUNK_BYTES = 1 << 20


def list_sidecars(source: Source) -> list[Path]:
    """Paths of the side files relative to the source's directory, sorted.

    Directories that are links, or cannot be listed, are among them: `copy_sidecars` says that it leaves them out.
    """
    found: list[Path] = []

    def not_listed(error: OSError) -> None:
        found.append(Path(error.filename).relative_to(source.directory))

    for folder, subfolders, files in os.walk(source.directory, onerror=not_listed):
        at_the_top = Path(folder) == source.directory
        unwanted = {VENDORS_WEIGHTS, *NOT_AT_THE_TOP} if at_the_top else set()
        here = [name for name in (*subfolders, *files) if not _is_hidden(name) and name not in unwanted]
        subfolders[:] = [name for name in here if name in subfolders and not Path(folder, name).is_symlink()]
        names = [name for name in here if name not in subfolders and not WEIGHT_FILE.fullmatch(name)]
        found += [Path(folder, name).relative_to(source.directory) for name in names]
    weights = {Path(name) for name in source.weight_files}
    return sorted(path for path in found if path not in weights)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def copy_sidecars(source: Source, directory: Path, report: Report) -> list[Path]:
    """Copy every side file into `directory`, under its relative path; returns those that were copied.

    Warns for each one that was not, with the reason. Raises RunError if `directory` cannot be written.
    """
    roots = _allowed_roots(source.directory)
    copied: list[Path] = []
    for path in list_sidecars(source):
        reason = _unreadable(source.directory / path, roots) or _copy(source.directory / path, directory / path)
        if reason:
            report.warn(f"{path} of the source is not copied: {reason}")
        else:
            copied.append(path)
    return copied


def _allowed_roots(directory: Path) -> tuple[Path, ...]:
    """Where the files of a source may really lie; a hub snapshot is REPO/snapshots/COMMIT, its files are REPO/blobs."""
    real = directory.resolve()
    return (real, real.parent.parent / "blobs") if real.parent.name == "snapshots" else (real,)


def _unreadable(path: Path, roots: tuple[Path, ...]) -> str | None:
    """Why a side file is not to be read."""
    try:
        real = path.resolve(strict=True)
        kind = real.stat().st_mode
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        return f"its link leads nowhere ({error})" if path.is_symlink() else str(error)
    if not any(root in real.parents for root in roots):
        return f"it is a link that leads out of the source, to {real}"
    if stat.S_ISDIR(kind):
        return "it is a directory that cannot be listed, or a link to one"
    return None if stat.S_ISREG(kind) else "it is no regular file"


def _copy(path: Path, target: Path) -> str | None:
    """Copy the bytes of one file; why it could not be read, or None."""
    if os.path.lexists(target):
        return "the export has a file of that name"
    try:
        reader = path.open("rb")
    except OSError as error:
        return str(error)
    with reader:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as writer:
                while chunk := reader.read(CHUNK_BYTES):
                    writer.write(chunk)
        except OSError as error:
            raise RunError(f"{target}: cannot copy {path}: {error}") from error
    return None
