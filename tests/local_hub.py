"""A hub on this machine: a server that answers what huggingface_hub asks about one repository, `org/name`.

It answers requests for ranges, as the real one does, and notes what it was asked for and what it gave: whole files, and
ranges of files. Told to, it answers a range wrongly, as a bad connection or a proxy does.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "org/name"
CUT_AT = 20  # bytes given of a range that goes wrong
STALL_SECONDS = 1.0


def etag(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


def files_of(directory: Path) -> dict[str, bytes]:
    """The files of a checkpoint, as a repository has them."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


class Hub(ThreadingHTTPServer):
    """`fetched`: files given whole, `ranges`: (file, first byte, bytes given) of those given in part.

    `asked`: files that were asked for in any way. `faults`: what is done to the next ranges, one each: "cut", "stall",
    "short", or a status.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.file_status = files, 200
        self.fetched: list[str] = []
        self.ranges: list[tuple[str, int, int]] = []
        self.asked: list[str] = []
        self.faults: list[str | int] = []
        self.knows_ranges = True
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    def weights_given(self) -> list[str]:
        return sorted(name for name in self.fetched if name.endswith(".safetensors"))

    def response(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        if not path.startswith((f"/api/models/{REPO}/", f"/{REPO}/resolve/")):
            return 404, b"", {"X-Error-Code": "RepoNotFound"}
        if "/resolve/" in path:
            body = self.files[file_in(path)]
            return self.file_status, body, {"ETag": f'"{etag(body)}"', "X-Repo-Commit": COMMIT}
        if "/tree/" in path:
            tree = [{"type": "file", "path": n, "size": len(b), "oid": etag(b)} for n, b in self.files.items()]
            return 200, json.dumps(tree).encode(), {"Content-Type": "application/json"}
        if path.endswith(("/revision/main", f"/revision/{COMMIT}")):
            return 200, json.dumps({"id": REPO, "sha": COMMIT}).encode(), {}
        return 404, b"", {"X-Error-Code": "RevisionNotFound"}


def file_in(path: str) -> str:
    return path.split("/resolve/")[1].split("/", 1)[1]


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        path = unquote(self.path.split("?")[0])
        status, body, headers = self.server.response(path)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first = 0
        if "ETag" in headers:
            self.server.asked.append(file_in(path))
        if asked and self.server.faults:
            part = body[int(asked[1]) : int(asked[2]) + 1]
            self.go_wrong(self.server.faults.pop(0), part)
            return
        if status == 200 and "ETag" in headers and asked and self.server.knows_ranges:
            first = int(asked[1])
            status, size = 206, len(body)
            body = body[first : int(asked[2]) + 1]
            headers |= {"Content-Range": f"bytes {first}-{first + len(body) - 1}/{size}"}
        if self.command == "GET" and "ETag" in headers:
            if status == 206:
                self.server.ranges.append((file_in(path), first, len(body)))
            else:
                self.server.fetched.append(file_in(path))
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_GET = do_HEAD

    def go_wrong(self, fault: str | int, part: bytes) -> None:
        """A range with a bad status, or less of it than was asked for: the connection breaks, stands still, or ends."""
        status, promised = (fault, 0) if isinstance(fault, int) else (206, CUT_AT if fault == "short" else len(part))
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Length", str(promised))
        self.end_headers()
        if status == 206:
            self.wfile.write(part[:CUT_AT])
            self.wfile.flush()
        if fault == "stall":
            time.sleep(STALL_SECONDS)


def use(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process use the hub, with `cache` as its cache; see `environment` for another process."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def environment(home: Path, url: str) -> dict[str, str]:
    """What makes a process use this hub, with its cache in `home`."""
    return {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
