"""Libraries of others for the page (assets/vendor), served from here and kept by the browser.

`GET /vendor/<digest>/<file>`: the digest is that of all the files, so an address always means the
same bytes, and the browser need never ask again. Only files that are listed exist.
"""

from functools import cache
from hashlib import sha256
from mimetypes import guess_type
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from assets import ASSETS

FOLDER = ASSETS / "vendor"
SERVED = (".js", ".css", ".woff2")
FOREVER = {"cache-control": "public, max-age=31536000, immutable"}


@cache
def files() -> dict[str, Path]:
    """All files that are served, by their paths below the prefix."""
    found = (path for path in sorted(FOLDER.rglob("*")) if path.suffix in SERVED)
    return {path.relative_to(FOLDER).as_posix(): path for path in found}


@cache
def prefix() -> str:
    """What their addresses begin with."""
    digest = sha256()
    for name, path in files().items():
        digest.update(name.encode() + path.read_bytes())
    return f"/vendor/{digest.hexdigest()[:16]}"


def routes() -> list[Route]:
    """The route by which they are fetched."""

    async def send(request: Request) -> Response:
        path = files().get(request.path_params["file"])
        if path is None or f"/vendor/{request.path_params['digest']}" != prefix():
            return PlainTextResponse("There is no such file.", 404)
        return FileResponse(path, headers=FOREVER, media_type=guess_type(path.name)[0])

    return [Route("/vendor/{digest}/{file:path}", send, methods=["GET"])]
