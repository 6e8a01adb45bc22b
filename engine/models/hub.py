"""The Hugging Face hub and its cache: stored files, downloads, and their errors.

Downloads are stored in the hub's own cache, where other programs find them too. The hub's client
discards a partial file when it is interrupted; here the part is kept, and the next attempt
continues after it.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path
from typing import Any

from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    WeakFileLock,
    build_hf_headers,
)

from engine.errors import Cancelled, ModelError, StrataError, first_line

Progress = Callable[[int, int], None]
"""Called with the bytes on this machine and the bytes in all; the first never falls."""

SECONDS = 5.0
"""The most seconds until the hub begins to answer."""
ROOM = "Make room there, or let HF_HOME name a folder on another disk."
UNREACHABLE = (
    "the hub cannot be reached ({}). Check the network, or choose a model that is on this machine."
)
BROKEN = (
    "the connection broke off ({}). What was downloaded stays; try again to continue from there."
)


def cached(repo: str, name: str, revision: str | None = None) -> str | None:
    """The path of a file of a repository in the hub's cache, None if it is not there."""
    try:
        found = try_to_load_from_cache(repo, name, revision=revision)
    except HFValidationError:
        return None  # no valid name of a repository; the hub's client reports the reason
    return found if isinstance(found, str) else None


def check_reachable(source: str) -> None:
    """Raise ConnectionError if a hub id is not cached and the hub cannot be reached. This is one
    quick query, because the hub's client itself retries for half a minute."""
    if cached(source, "config.json"):
        return
    try:
        get_hf_file_metadata(hf_hub_url(source, "config.json"), timeout=SECONDS)
    except HfHubHTTPError:
        return  # the hub answers; the loader explains a wrong id better
    except Exception as error:
        raise ConnectionError(f"the hub cannot be reached ({error})") from error


@dataclass(frozen=True, slots=True)
class Remote:
    """A file on the hub: its bytes, its name among the blobs of the cache, its hash if known."""

    name: str
    size: int
    blob: str
    sha256: str | None


def remote(sibling: Any) -> Remote:
    sha256 = sibling.lfs.sha256 if sibling.lfs else None
    return Remote(sibling.rfilename, sibling.size or 0, sha256 or sibling.blob_id, sha256)


class Meter:
    """Replaces the hub client's progress bar: counts over all files, and can be cancelled."""

    def __init__(self, total: int, progress: Progress, cancelled: Callable[[], bool]) -> None:
        self.total, self.progress, self.cancelled = total, progress, cancelled
        self.before = self.here = self.reported = 0

    def begin(self, initial: int = 0, **_: object) -> "Meter":
        """Begin a file, or continue it after its first `initial` bytes."""
        self.here = initial
        self.update(0)
        return self

    def update(self, count: float | None = 1) -> None:
        """Count received bytes, negative if a server starts again. Raises Cancelled."""
        if self.cancelled():
            raise Cancelled("The download was stopped. What has arrived stays.")
        self.here += int(count or 0)
        self.reported = max(self.reported, self.before + self.here)
        self.progress(self.reported, self.total)

    def end(self, size: int) -> None:
        self.before += size
        self.begin()

    def __enter__(self) -> "Meter":
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to close."""


@dataclass(frozen=True, slots=True)
class Store:
    """The place of one commit of a repository in the hub's cache."""

    repo: str
    commit: str

    def read(self, name: str) -> str:
        """The text of a small file, which is downloaded if it is missing."""
        path = hf_hub_download(self.repo, name, revision=self.commit, etag_timeout=SECONDS)
        return Path(path).read_text("utf-8")

    def blob(self, file: Remote, ending: str = "") -> Path:
        """The path of a file's content; an incomplete one has the ending ".part"."""
        return repo_folder(self.repo) / "blobs" / f"{file.blob}{ending}"

    def bytes_here(self, file: Remote) -> int:
        """Bytes of a file that need not be downloaded."""
        if cached(self.repo, file.name, self.commit) or self.blob(file).is_file():
            return file.size
        part = self.blob(file, ".part")
        return part.stat().st_size if part.is_file() else 0

    def fetch(self, file: Remote, meter: Meter) -> str:
        """The path of a file, which is downloaded if it is missing."""
        meter.begin()
        path = cached(self.repo, file.name, self.commit) or self.place(file, meter)
        meter.end(file.size)
        return path

    def place(self, file: Remote, meter: Meter) -> str:
        """Put a file into the cache; its content is downloaded if it is missing."""
        blob = self.blob(file)
        if not blob.is_file():
            blob.parent.mkdir(parents=True, exist_ok=True)
            # This is the lock of the hub's client, because two writers would damage the file.
            lock = blob.parents[2] / ".locks" / blob.parents[1].name / f"{file.blob}.lock"
            lock.parent.mkdir(parents=True, exist_ok=True)
            with WeakFileLock(lock, timeout=1.0):
                self.fill(file, meter)
        # The client finds the content in the cache and links the file's name to it.
        path = hf_hub_download(self.repo, file.name, etag_timeout=SECONDS)
        if not os.path.islink(path):
            blob.unlink(missing_ok=True)  # a system without links: it was copied
        return path

    def fill(self, file: Remote, meter: Meter) -> None:
        """Download the rest of a file, and check all of it against its hash."""
        part = self.blob(file, ".part")
        bar: Any = meter.begin
        with part.open("ab") as out:
            http_get(
                hf_hub_url(self.repo, file.name, revision=self.commit),
                out,
                resume_size=out.tell(),
                headers=build_hf_headers(),
                expected_size=file.size,
                tqdm_class=bar,
            )
        if file.sha256:
            with part.open("rb") as whole:
                found = hashlib.file_digest(whole, "sha256").hexdigest()
            if found != file.sha256:
                part.unlink()
                raise ModelError(
                    f"The file {file.name!r} arrived damaged from the hub: its hash is {found}. "
                    "It was discarded; download it again."
                )
        part.replace(self.blob(file))


def repo_folder(repo: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


def tidy(folder: Path, unwanted: Callable[[str], bool]) -> int:
    """Delete the files of a repository in the cache whose names are `unwanted`, in each of its
    commits, and all content without a name; returns the bytes that this frees. Incomplete downloads
    are deleted as well. A repository without files is deleted completely."""
    before, named = disk_bytes(folder), set[str]()
    for snapshot in sorted((folder / "snapshots").glob("*")):
        for path in [p for p in snapshot.rglob("*") if p.is_symlink() or p.is_file()]:
            if unwanted(str(path.relative_to(snapshot))):
                path.unlink()
            else:
                named.add(os.path.realpath(path))
    if not named:
        shutil.rmtree(folder)
        return before
    for blob in (folder / "blobs").glob("*"):
        if os.path.realpath(blob) not in named:
            blob.unlink()
    return before - disk_bytes(folder)


def disk_bytes(folder: Path) -> int:
    found = (path for name in ("blobs", "snapshots") for path in (folder / name).rglob("*"))
    return sum(p.stat().st_size for p in found if p.is_file() and not p.is_symlink())


def check_space(source: str, needed: int) -> None:
    """Raise ModelError if the disk of the hub's cache has less than `needed` bytes free."""
    cache = Path(constants.HF_HUB_CACHE)
    folder = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"The model {source!r} could not be downloaded: {needed / 1e9:.1f} GB are missing of "
            f"it, and {str(cache)!r} has room for {free / 1e9:.1f} GB. {ROOM}"
        )


@contextmanager
def explained(source: str, otherwise: str) -> Iterator[None]:
    """Turn the exceptions of the hub's client into ModelErrors; `otherwise` is the text for all
    other exceptions."""
    try:
        yield
    except StrataError:
        raise
    except Exception as error:
        # The client also raises the exceptions of its HTTP library, over a dozen types.
        raise ModelError(
            f"The model {source!r} could not be downloaded: {reason(source, error, otherwise)}"
        ) from error


def reason(source: str, error: Exception, otherwise: str) -> str:
    """The problem and its solution: the end of one sentence, and another sentence."""
    match error:
        case OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set. Unset it, or choose a model that is on this machine."
        case GatedRepoError():
            page = f"{constants.ENDPOINT}/{source.partition(':')[0]}"
            return f"its makers want their terms accepted. Do so at {page}, then `hf auth login`."
        case RepositoryNotFoundError():
            return (
                "the hub has no such repository, or it is private. Check the name; for a private "
                "one log in with `hf auth login`."
            )
        case HFValidationError():
            return 'this is no name on the hub. Give "owner/name" or "owner/name:file.gguf".'
        case HfHubHTTPError() if error.response.status_code in (401, 403):
            return "the hub wants to know who you are. Log in with `hf auth login`."
        case HfHubHTTPError():
            return f"the hub answers with error {error.response.status_code}. Try again later."
        case TimeoutError():
            return "another download of it is under way. Wait for that one, then try again."
        case OSError(errno=number) if number == ENOSPC:
            return f"the disk is full. {ROOM}"
        case OSError(errno=int()):
            return f"it cannot be written ({error}). Let HF_HOME name a folder that can be."
    return otherwise.format(first_line(error))
