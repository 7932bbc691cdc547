"""A hub id becomes a directory: one commit, fetched once, only what is needed, and the weights last.

    1. fetch_small_files   resolve the revision to a commit; configuration, tokenizer, code, index
    2. fetch_headers       of the weight files of that very commit that are not in the cache, the beginnings, by range
                           requests: all that planning needs. The weights are the files the index names, else
                           model.safetensors, else *.safetensors; what is in the cache is not asked about
    3. fetch_weights       the files themselves, when nothing speaks against the run

Weights in other formats (`*.bin *.pth *.gguf *.onnx`, `original/`, `consolidated*`) are never asked for. Without a
network, or with HF_HUB_OFFLINE=1, huggingface_hub answers from its cache, where a revision is known by the name it was
fetched under. A model that is there wholly is read there; of another, the checks that every source goes through name
what is missing, with the cure that is known here: a network, or where the hub has no such file, another revision.

huggingface_hub's own reader of remote headers (`parse_safetensors_file_metadata`) tells neither where the data begin
nor what is wrong with a header, and gives up when the hub is busy; so its parts are used, and headers.py parses. They
ask again where there is no answer; an answer that breaks off is asked for again here.

What this file does not know: what is in the files, the index and the length of a header apart.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ptq.checkpoint.headers import MAX_HEADER_BYTES, Beginning, some
from hf_ptq.checkpoint.room import Need, room_problems
from hf_ptq.checkpoint.weights import (
    HEADER_THREADS,
    INDEX_FILE,
    SINGLE_FILE,
    is_plain_weights,
    read_weight_map,
    safe_name,
)
from hf_ptq.errors import Problem, RunError, UserError, refuse_if_any

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

SMALL_FILES = (
    *("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.vocab", "*.bpe", "*.spm", "*.py"),
    *("*.md", "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*"),
)
NEVER = ("original/*", "consolidated*", "onnx/*", "openvino/*", "coreml/*", "gguf/*", ".git*")
FIRST_BYTES = 100_000  # asked for at once: most headers are shorter
RETRY_SECONDS = (1.0, 4.0)  # before a range that came only in part is asked for again

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"{_PART}(?:/{_PART})?")


def is_hub_id(text: str) -> bool:
    """Whether `text` can be the name of a model on the hub: `name` or `owner/name`, by spelling alone."""
    return len(text) <= 96 and bool(_HUB_ID.fullmatch(text)) and "--" not in text and ".." not in text


def fetch_small_files(repo: str, revision: str | None) -> tuple[Path, str]:
    """The directory of one commit of `repo` in the hub's cache, and the commit (40 hexadecimal digits).

    Everything small is there afterwards. Raises `UserError` (no such model or revision, gated, not reachable and not
    cached), `RunError` (the hub or the disk failed on the way), as the functions below do.
    """
    with _told(repo, revision, repo if revision is None else f"{repo} (revision {revision})"):
        directory = _snapshot(repo, revision, SMALL_FILES)
    return directory, directory.name


@dataclass(frozen=True)
class OnHub:
    """What of a commit's weights is on the hub only: file -> its beginning."""

    beginnings: dict[str, Beginning]
    cure: str  # of files that are neither here nor among these


def fetch_headers(repo: str, commit: str, directory: Path) -> OnHub:
    """The beginnings of the weight files that are not in the cache; `directory` is the commit's.

    None where the hub cannot be asked: then the directory is what it is.
    """
    from huggingface_hub import errors

    wanted = _names_by_index(directory)
    lacking = OnHub({}, f"{repo} does not have them: take another --revision, or tell its owners")
    if all((directory / name).is_file() for name in ([SINGLE_FILE] if wanted is None else wanted)):
        return lacking
    with _told(repo, commit, f"the weights of {repo}"):
        try:
            listed = _list_weights(repo, commit, wanted)
        except (errors.DryRunError, errors.LocalEntryNotFoundError) as error:
            return OnHub({}, _cure_without_hub(repo, error))
        sizes = _link_cached(repo, commit, directory, listed)
        with ThreadPoolExecutor(HEADER_THREADS) as pool:
            beginnings = pool.map(lambda name: _beginning(repo, commit, name, sizes[name]), sizes)
            return replace(lacking, beginnings=dict(zip(sizes, beginnings, strict=True)))


def fetch_weights(repo: str, commit: str, directory: Path, files: Mapping[str, Beginning]) -> None:
    """Download `files` of a commit. Raises UserError where the cache is closed or the disk has no room, too."""
    refuse_if_any([*cache_problems(repo, directory), *room_problems([room_for_download(repo, directory, files)])])
    with _told(repo, commit, f"{some(files)} of {repo}"):
        _snapshot(repo, commit, [_literally(name) for name in files])


def cache_problems(repo: str, directory: Path) -> list[Problem]:
    """Why nothing can be downloaded into the cache: it is on a read-only disk, or somebody else's.

    `directory`: the commit's, where links to the files are made; the files lie beside it, and the locks at the top.
    """
    repository = directory.parents[1]
    written = (directory, repository / "blobs", repository.parent / ".locks" / repository.name)
    there = [next(place for place in (path, *path.parents) if place.is_dir()) for path in written]
    closed = dict.fromkeys(str(place) for place in there if not os.access(place, os.W_OK))
    what = f"the weights of {repo} are to be downloaded, and this cannot be written to: {some(closed)}"
    return [Problem(what, "set HF_HOME to a directory that can be written to")] if closed else []


def room_for_download(repo: str, directory: Path, files: Mapping[str, Beginning]) -> Need:
    """What `files` will need on the disk of the hub's cache."""
    num_bytes = sum(file.file_bytes for file in files.values())
    return Need(f"the download of {repo}", directory, num_bytes, "set HF_HOME to a directory on another disk")


@contextmanager
def _told(repo: str, revision: str | None, wanted: str) -> Iterator[None]:
    """Inside the block, every way the hub can say no becomes an error of ours. `wanted`: what is asked for there."""
    from huggingface_hub import errors

    failures: Any = (OSError, *errors.HfHubHTTPError.__bases__)  # the second is the HTTP library's own error
    try:
        yield
    except errors.GatedRepoError:
        cure = f"accept its terms at https://huggingface.co/{repo}, then `hf auth login` or set HF_TOKEN"
        raise UserError(Problem(f"{repo} is gated, and this account has no access to it", cure)) from None
    except errors.RepositoryNotFoundError:
        cure = "check the spelling; for a private model `hf auth login` or set HF_TOKEN"
        raise UserError(Problem(f"{repo} is no directory here and no model on the hub", cure)) from None
    except errors.RevisionNotFoundError:
        cure = f"see https://huggingface.co/{repo}/tree/main for its branches and tags"
        raise UserError(Problem(f"--revision: {repo} has no revision {revision!r}", cure)) from None
    except errors.LocalEntryNotFoundError as error:
        raise UserError(_not_cached(repo, wanted, error)) from None
    except errors.HFValidationError as error:
        raise UserError(Problem(f"{repo} is no hub id ({error})")) from None
    except failures as error:
        raise RunError(Problem(f"fetching {repo} failed: {error}", "try again; HF_HOME chooses the disk")) from error


def _snapshot(repo: str, revision: str | None, wanted: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    unwanted = NEVER if wanted == SMALL_FILES else ()
    return Path(snapshot_download(repo, revision=revision, allow_patterns=list(wanted), ignore_patterns=list(unwanted)))


def _names_by_index(directory: Path) -> list[str] | None:
    """The weight files that the index names; None without an index.

    Without the names, or the whole of an index, that other checks refuse.
    """
    index = directory / INDEX_FILE
    if not index.exists():
        return None
    weight_map = read_weight_map(index)
    named = () if isinstance(weight_map, Problem) else weight_map.values()
    return sorted(name for name in set(named) if safe_name(name) and name.endswith(".safetensors"))


def _list_weights(repo: str, commit: str, wanted: Sequence[str] | None) -> list[DryRunFileInfo]:
    """The weight files that the repository has, of those that the index names (`wanted`) or else of all.

    Raises DryRunError or LocalEntryNotFoundError where the hub cannot be asked, and the cache does not know.
    """
    from huggingface_hub import snapshot_download
    from tqdm.auto import tqdm

    class NoBar(tqdm):  # the bars would speak of a download
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    patterns, unwanted = ["*.safetensors"], [*NEVER, "*/*"]  # not asked about: the hub may be away, and they not here
    if wanted is not None:
        patterns, unwanted = [_literally(name) for name in wanted], []
    listed = snapshot_download(
        repo, revision=commit, allow_patterns=patterns, ignore_patterns=unwanted, dry_run=True, tqdm_class=NoBar
    )
    files = {info.filename: info for info in listed}
    chosen = wanted or ([SINGLE_FILE] if SINGLE_FILE in files else filter(is_plain_weights, files))
    return [files[name] for name in chosen if name in files]


def _link_cached(repo: str, commit: str, directory: Path, listed: Sequence[DryRunFileInfo]) -> dict[str, int]:
    """Name -> bytes of the files that have to be downloaded; those that another commit has are linked here."""
    linked = [info.filename for info in listed if info.is_cached and not (directory / info.filename).is_file()]
    if linked:
        _snapshot(repo, commit, [_literally(name) for name in linked])
    return {info.filename: info.file_size or 0 for info in listed if not info.is_cached}


def _beginning(repo: str, commit: str, name: str, file_bytes: int) -> Beginning:
    from huggingface_hub import hf_hub_url

    url, where = hf_hub_url(repo, name, revision=commit), f"{name} of {repo} on the hub"
    start = _read_range(url, where, 0, min(FIRST_BYTES, file_bytes))
    end = 8 + int.from_bytes(start[:8], "little")
    if len(start) < end <= min(file_bytes, 8 + MAX_HEADER_BYTES):
        start += _read_range(url, where, len(start), end)
    return Beginning(where, start[:end], file_bytes)


def _read_range(url: str, where: str, begin: int, end: int) -> bytes:
    """Bytes [begin, end) of the file at `url`; asked for again where an answer has less. RunError where all have."""
    read, reason = b"", ""
    for seconds in (0.0, *RETRY_SECONDS):
        time.sleep(seconds)
        read, reason = _try_range(url, begin, end)
        if len(read) == end - begin:
            return read
    told = f" ({reason})" if reason else ""
    what = f"{where}: it sent {len(read)} of {end - begin} bytes asked for{told}, {1 + len(RETRY_SECONDS)} times"
    raise RunError(Problem(what, "try again; check the network, and any proxy on the way"))


def _try_range(url: str, begin: int, end: int) -> tuple[bytes, str]:
    """What came of a range, and why no more came; of an answer with the whole file no more is read than that.

    A body that breaks must not be told to the context of `http_stream_backoff`, which would begin it anew.
    """
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    if begin == end:
        return b"", ""
    http_error: Any = errors.HfHubHTTPError.__bases__[0]  # the HTTP library's own
    asked = {**build_hf_headers(), "Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    with http_stream_backoff("GET", url, headers=asked, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
        hf_raise_for_status(response)
        first = begin if response.status_code == 206 else 0
        read = bytearray()
        try:
            _take(response.iter_bytes(), end - first, read)
        except http_error as error:
            return bytes(read[begin - first :]), f"{type(error).__name__}: {error}"
    return bytes(read[begin - first : end - first]), ""


def _take(chunks: Iterable[bytes], num_bytes: int, read: bytearray) -> None:
    """Add chunks to `read` until it has `num_bytes`, and no more of them."""
    for chunk in chunks:
        read += chunk
        if len(read) >= num_bytes:
            return


def _literally(name: str) -> str:
    """`name` as a pattern that matches nothing else."""
    return re.sub(r"([*?[])", r"[\1]", name)


def _not_cached(repo: str, wanted: str, error: Exception) -> Problem:
    from huggingface_hub import constants

    missing = f"not (or not wholly) in the cache {constants.HF_HUB_CACHE}: {error}"
    if constants.HF_HUB_OFFLINE:
        return Problem(
            f"HF_HUB_OFFLINE is set, and {wanted} is {missing}",
            f"run once without HF_HUB_OFFLINE, or `hf download {repo}` where there is a network, or give a directory",
        )
    what = f"the hub does not answer for {wanted}, which is {missing}"
    return Problem(what, "check the network and HF_ENDPOINT, or give a directory")


def _cure_without_hub(repo: str, error: Exception) -> str:
    """`error`: of huggingface_hub, whose cause says why the hub gave no answer."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        once = f"run once without it, or `hf download {repo}` where there is a network, or give a directory"
        return f"HF_HUB_OFFLINE is set: {once}"
    reason = str(error.__cause__ or error).partition("\n")[0]
    return f"the hub does not answer ({reason}): check the network and HF_ENDPOINT, or give a directory"
