"""A hub id becomes a directory: one commit, downloaded once, only what is needed.

    1. resolve the revision to a commit and fetch everything small: configuration, tokenizer, code, index
    2. fetch the weights of that very commit: the files the index names, else model.safetensors, else *.safetensors

Weights in other formats (`*.bin *.pth *.gguf *.onnx`, `original/`, `consolidated*`) are never asked for. Without a
network, or with HF_HUB_OFFLINE=1, huggingface_hub answers both steps from its cache, where a revision is known by the
name it was fetched under. What is missing there is found by the checks that every source goes through.

What this file does not know: what is in the files, the index apart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_ptq.checkpoint.weights import INDEX_FILE, SINGLE_FILE, read_weight_map, safe_name
from hf_ptq.errors import Problem, RunError, UserError

SMALL_FILES = (
    *("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.vocab", "*.bpe", "*.spm", "*.py"),
    *("*.md", "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*"),
)
NEVER = ("original/*", "consolidated*", "onnx/*", "openvino/*", "coreml/*", "gguf/*", ".git*")
NESTED = "*/*"

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"{_PART}(?:/{_PART})?")


def is_hub_id(text: str) -> bool:
    """Whether `text` can be the name of a model on the hub: `name` or `owner/name`, by spelling alone."""
    return len(text) <= 96 and bool(_HUB_ID.fullmatch(text)) and "--" not in text and ".." not in text


def fetch_snapshot(repo: str, revision: str | None) -> tuple[Path, str]:
    """The directory of one commit of `repo` in the hub's cache, and the commit (40 hexadecimal digits).

    Raises `UserError` (no such model or revision, gated, not reachable and not cached), `RunError` (the hub or the
    disk failed on the way).
    """
    from huggingface_hub import errors

    failures: Any = (OSError, *errors.HfHubHTTPError.__bases__)  # the second is the HTTP library's own error
    try:
        return _fetch(repo, revision)
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
        raise UserError(_not_cached(repo, revision, error)) from None
    except errors.HFValidationError as error:
        raise UserError(Problem(f"{repo} is no hub id ({error})")) from None
    except failures as error:
        raise RunError(Problem(f"fetching {repo} failed: {error}", "try again; HF_HOME chooses the disk")) from error


def _fetch(repo: str, revision: str | None) -> tuple[Path, str]:
    from huggingface_hub import snapshot_download

    def fetch(revision: str | None, wanted: Sequence[str], unwanted: Sequence[str] = ()) -> Path:
        return Path(
            snapshot_download(repo, revision=revision, allow_patterns=list(wanted), ignore_patterns=list(unwanted))
        )

    directory = fetch(revision, SMALL_FILES, NEVER)
    commit = directory.name
    if (directory / INDEX_FILE).exists():
        weight_map = read_weight_map(directory / INDEX_FILE)
        if not isinstance(weight_map, Problem):  # a broken index is reported by the checks of the directory
            fetch(commit, [_literally(name) for name in sorted(set(weight_map.values())) if safe_name(name)])
        return directory, commit
    fetch(commit, [SINGLE_FILE])
    if not (directory / SINGLE_FILE).exists():
        fetch(commit, ["*.safetensors"], [*NEVER, NESTED])
    return directory, commit


def _literally(name: str) -> str:
    """`name` as a pattern that matches nothing else."""
    return re.sub(r"([*?[])", r"[\1]", name)


def _not_cached(repo: str, revision: str | None, error: Exception) -> Problem:
    from huggingface_hub import constants

    wanted = repo if revision is None else f"{repo} (revision {revision})"
    if constants.HF_HUB_OFFLINE:
        return Problem(
            f"HF_HUB_OFFLINE is set, and {wanted} is not (or not wholly) in the cache {constants.HF_HUB_CACHE}",
            f"run once without HF_HUB_OFFLINE, or `hf download {repo}` where there is a network, or give a directory",
        )
    what = f"the hub does not answer for {wanted}, which is not (or not wholly) in the cache {constants.HF_HUB_CACHE}"
    return Problem(f"{what}: {error}", "check the network and HF_ENDPOINT, or give a directory")
