"""One source for all ranks: found and looked into before anything else, its weights fetched when nothing is against it.

Rank 0 resolves, fetches and converts; it tells the others where, and the headers of files that are still on the hub.
After each step every rank knows that all see the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hf_ptq.checkpoint.headers import Beginning
from hf_ptq.checkpoint.source import Source, download, downloaded, open_source
from hf_ptq.config import RunConfig
from hf_ptq.distributed.agreement import first_decides, same_everywhere, together
from hf_ptq.distributed.process_group import DistributedState
from hf_ptq.errors import Problem, UserError, refuse_if_any
from hf_ptq.export.destination import check_export_path
from hf_ptq.export.shared_destination import CURE, refuse_unshared_path, unseen
from hf_ptq.report import Report, versions
from hf_ptq.sizes import exact_bytes


def open_on_all(
    model: str,
    revision: str | None,
    trust_remote_code: bool,
    state: DistributedState,
    report: Report,
    refuse: Callable[[Source], list[Problem]] = lambda _: [],
) -> Source:
    """The source with its headers, the same on every rank; rank 0 finds it, and says what it has to `refuse` in it.

    Raises `UserError` on all ranks with all problems, or where a rank does not see it.
    """
    opened: list[Source] = []

    def find() -> dict[str, Any]:
        source = open_source(model, revision, trust_remote_code, report)
        refuse_if_any([*refuse(source), *source.download_problems()])
        opened.append(source)
        return {
            "directory": str(source.directory),
            "commit": source.commit,
            "files": [file for file in source.weight_files if file not in source.elsewhere],
            "elsewhere": {file: _as_json(beginning) for file, beginning in source.elsewhere.items()},
        }

    found = first_decides(state, "resolve the source", find, is_long=True)

    def see() -> Source:
        if opened:
            return opened[0]
        directory = Path(found["directory"])
        if missing := unseen([directory / name for name in ("config.json", *found["files"])]):
            raise UserError(Problem(f"the source: {missing[0]} is not seen on this node", CURE))
        elsewhere = {file: _from_json(told) for file, told in found["elsewhere"].items()}
        source = open_source(str(directory), None, trust_remote_code, report, elsewhere)
        return replace(source, origin=model, commit=found["commit"])

    return together(state, "see the source", see)


def resolve(config: RunConfig, state: DistributedState, report: Report) -> Source:
    """The source with its headers; the export path is held against it. Every rank sees both, and the same."""

    def refuse(source: Source) -> list[Problem]:
        return check_export_path(config.export_path, source.directory, config.overwrite)

    source = open_on_all(config.model, config.revision, config.trust_remote_code, state, report, refuse)
    refuse_unshared_path(state, config.export_path)
    if state.world_size > 1:
        same_everywhere(state, "compare the ranks", _fingerprint(config, source, state))
    report.record(
        "source",
        {
            "origin": source.origin,
            "directory": source.directory,
            "commit": source.commit,
            "tensors": len(source.tensors),
            "bytes": source.total_bytes,
            "to_download": source.download_bytes,
        },
    )
    if source.elsewhere:
        size = f"{len(source.elsewhere)} files, {exact_bytes(source.download_bytes)}"
        report.say(f"{source.origin}: its weights are not in the cache yet; to download: {size}")
    return source


def fetch_weights(state: DistributedState, source: Source, report: Report) -> Source:
    """The source with every weight on the disk, and its headers as they were; rank 0 downloads what is not there."""
    if not source.elsewhere:
        return source
    with report.stage("download"):
        first_decides(state, "download the weights", lambda: download(source), is_long=True)

        def see() -> Source:
            if missing := unseen(source.directory / file for file in source.elsewhere):
                raise UserError(Problem(f"the source: {missing[0]} is not seen on this node", CURE))
            return downloaded(source)

        return together(state, "see the weights", see)


def _as_json(beginning: Beginning) -> list[Any]:
    """Its bytes as characters of the same numbers."""
    return [beginning.where, beginning.start.decode("latin-1"), beginning.file_bytes]


def _from_json(told: list[Any]) -> Beginning:
    where, start, file_bytes = told
    return Beginning(where, start.encode("latin-1"), file_bytes)


def _fingerprint(config: RunConfig, source: Source, state: DistributedState) -> dict[str, Any]:
    """What has to be the same on all ranks: options, versions, device, commit, and each file's size and header."""
    headers: dict[str, list[Any]] = {file: [] for file in source.weight_files}
    for entry in source.tensors.values():
        headers[entry.file].append((entry.name, entry.dtype, entry.shape, entry.offset, entry.num_bytes))
    files = {f"the header of {file}": _digest(entries) for file, entries in headers.items()}
    sizes = {f"the size of {file}": identity and identity[2] for file, identity in source.as_found.items()}
    options = {f"the option {name}": str(value) for name, value in asdict(config).items()}
    software = {f"the version of {name}": version for name, version in versions().items() if name != "platform"}
    settings = {"config.json": _digest(source.config), "the commit": source.commit, "the device": state.device.type}
    return options | software | settings | files | sizes


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
