"""What a page fetches besides Gradio's events: revisions, downloads, scripts and libraries.

- `GET /revision/<token>` returns the revision of a conversation or of the list of conversations. A
  page compares this number with its own (app/service/pages.py). Every visible page asks every few
  seconds, so the route does little more than read the number.
- `GET /download/<token>` returns a file that was offered to one page. It works once.
- `GET /vendor/<digest>/<file>` returns a third-party library (assets/vendor). The digest covers all
  files, so an address always means the same bytes and the browser caches it forever. Only the files
  listed by `library_files` can be fetched.
"""

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from mimetypes import guess_type
from pathlib import Path
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from app.http.login import logged_in
from app.service.session import Session
from assets import ASSETS
from engine.errors import StorageError

NO_CONVERSATION = "There is no such conversation. It may have been deleted."
FRESH = {"cache-control": "no-store"}
FOREVER = {"cache-control": "public, max-age=31536000, immutable"}
FOLDER = ASSETS / "vendor"
SERVED = (".js", ".css", ".woff2")


def routes(session: Session) -> list[Route]:
    def revision(request: Request) -> Response:
        if not logged_in(request.app, request.cookies):
            return PlainTextResponse("Log in first.", 401)
        place = session.change_tokens.keys.get(request.path_params["token"])
        if place is None:
            return PlainTextResponse(NO_CONVERSATION, 404)
        try:
            return PlainTextResponse(str(session.chat.revision(*place)), headers=FRESH)
        except StorageError:
            return PlainTextResponse(NO_CONVERSATION, 404)

    def download(request: Request) -> Response:
        if not logged_in(request.app, request.cookies):
            return PlainTextResponse("Log in first.", 401)
        found = session.downloads.take(request.path_params["token"])
        if found is None:
            return PlainTextResponse("There is no such file any more. Ask for it again.", 404)
        attached = f"attachment; filename*=UTF-8''{quote(found.name)}"
        headers = {**FRESH, "content-disposition": attached}
        return StreamingResponse(found.parts(), media_type=found.kind, headers=headers)

    async def library(request: Request) -> Response:
        path = library_files().get(request.path_params["file"])
        if path is None or f"/vendor/{request.path_params['digest']}" != library_prefix():
            return PlainTextResponse("There is no such file.", 404)
        return FileResponse(path, headers=FOREVER, media_type=guess_type(path.name)[0])

    return [
        Route("/revision/{token}", revision, methods=["GET"]),
        Route("/download/{token}", download, methods=["GET"]),
        Route("/vendor/{digest}/{file:path}", library, methods=["GET"]),
    ]


@cache
def library_files() -> dict[str, Path]:
    found = (path for path in sorted(FOLDER.rglob("*")) if path.suffix in SERVED)
    return {path.relative_to(FOLDER).as_posix(): path for path in found}


@cache
def library_prefix() -> str:
    digest = sha256()
    for name, path in library_files().items():
        digest.update(name.encode() + path.read_bytes())
    return f"/vendor/{digest.hexdigest()[:16]}"


def script_address(folder: str, script: str) -> str:
    """The address of a script. It changes with the script, so browsers can cache it forever."""
    return f"{folder}/{sha256(script.encode()).hexdigest()[:16]}.js"


def script_route(folder: str, script: Callable[[], str]) -> Route:
    """A route that serves a script at its `script_address`."""

    async def send(request: Request) -> Response:
        text = script()
        if request.url.path != script_address(folder, text):
            return PlainTextResponse("There is no such script.", 404)
        return Response(text, headers=FOREVER, media_type="text/javascript")

    return Route(folder + "/{name}", send, methods=["GET"])
