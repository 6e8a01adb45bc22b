"""A server on this machine that speaks as much of the hub's protocol as its client needs.

As on the hub, large files (weights) lie elsewhere: their address redirects to another host, which
knows no log-in.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".gguf", ".safetensors", ".bin")


class Hub:
    """What the server has, how it misbehaves, and what it was asked: "GET /path bytes=7-"."""

    def __init__(self, repos: dict[str, dict[str, bytes]]) -> None:
        self.repos = repos
        self.gated: set[str] = set()
        self.status = 0
        self.breaks_after: int | None = None
        self.ranges = True
        self.damaged = False
        self.asked: list[str] = []
        self.tokens: list[tuple[str, str | None]] = []
        self.url = ""
        self.sends = threading.Event()
        """Whether it sends large files now, or lets them wait."""
        self.sends.set()

    def fetched(self, name: str) -> list[str]:
        """How the content of a file was asked for, one text for each time."""
        return [line for line in self.asked if line.startswith("GET /cdn/") and name in line]


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(self.path.split("?")[0])
        self.asked_for = self.headers.get("Range", "")
        hub.asked.append(f"{self.command} {path} {self.asked_for}".rstrip())
        hub.tokens.append((path, self.headers.get("Authorization")))
        if hub.status:
            return self.reply(hub.status)
        if path.startswith("/api/models/"):
            return self.describe(path.removeprefix("/api/models/"))
        if path.startswith("/cdn/"):
            hub.sends.wait(60)
            owner, name, file = path.removeprefix("/cdn/").split("/", 2)
            return self.send(hub.repos[f"{owner}/{name}"][file])
        repo, _, rest = path.removeprefix("/").partition("/resolve/")
        name = rest.partition("/")[2]
        if repo not in hub.repos:
            return self.reply(401, X_Error_Code="RepoNotFound")
        if repo in hub.gated:
            return self.reply(403, X_Error_Code="GatedRepo")
        if name not in hub.repos[repo]:
            return self.reply(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        body = hub.repos[repo][name]
        etag = f'"{blob_of(name, body)}"'
        if not name.endswith(LARGE):
            return self.send(body, ETag=etag, X_Repo_Commit=COMMIT)
        self.reply(
            302,
            Location=f"{hub.url.replace('127.0.0.1', 'localhost')}/cdn/{repo}/{name}",
            X_Linked_ETag=etag,
            X_Linked_Size=str(len(body)),
            X_Repo_Commit=COMMIT,
        )

    do_HEAD = do_GET

    def describe(self, rest: str) -> None:
        repo, _, folder = rest.partition("/tree/")
        if repo not in self.hub.repos:
            return self.reply(401, X_Error_Code="RepoNotFound")
        if "/" in folder:
            return self.reply(404, X_Error_Code="EntryNotFound")  # nobody lists the inside of one
        files = [described(name, body) for name, body in sorted(self.hub.repos[repo].items())]
        listing: object = [{**file, "type": "file", "path": file["rfilename"]} for file in files]
        if not folder:
            listing = {"id": repo, "sha": COMMIT, "siblings": files, "tags": [], "gated": False}
        self.reply(200, json.dumps(listing).encode(), Content_Type="application/json")

    def send(self, body: bytes, **headers: str) -> None:
        """Content, or the rest of it behind the bytes that are there already."""
        start = int(self.asked_for.removeprefix("bytes=").rstrip("-") or 0)
        if self.hub.damaged:
            body = bytes(len(body))
        if start and self.hub.ranges:
            headers["Content_Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            return self.reply(206, body[start:], **headers)
        self.reply(200, body, **headers)

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            whole = self.hub.breaks_after is None or not self.path.startswith("/cdn/")
            self.wfile.write(body if whole else body[: self.hub.breaks_after])
            self.close_connection = self.close_connection or not whole

    def log_message(self, *arguments: object) -> None:
        """Quiet."""


def blob_of(name: str, body: bytes) -> str:
    """What the hub calls a content: its SHA-256 where it is large, else its hash in git."""
    if name.endswith(LARGE):
        return hashlib.sha256(body).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def described(name: str, body: bytes) -> dict[str, object]:
    file: dict[str, object] = {"rfilename": name, "size": len(body), "oid": blob_of("", body)}
    file["blobId"] = file["oid"]
    if name.endswith(LARGE):
        sha256 = blob_of(name, body)
        file["lfs"] = {"sha256": sha256, "oid": sha256, "size": len(body), "pointerSize": 130}
    return file


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub with its server running; `hub.url` is its address."""
    handler = type("OneHub", (Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        yield hub
        server.shutdown()
        thread.join()
