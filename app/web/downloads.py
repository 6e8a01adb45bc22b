"""The route by which a page fetches a file that it was offered: once, and for itself alone."""

from collections.abc import Iterator
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from app.http.login import logged_in
from app.service.downloads import Downloads


def routes(downloads: Downloads) -> list[Route]:
    """The route."""

    def fetch(request: Request) -> Response:
        if not logged_in(request.app, request.cookies):
            return PlainTextResponse("Log in first.", 401)
        found = downloads.take(request.path_params["token"])
        if found is None:
            return PlainTextResponse("There is no such file any more. Ask for it again.", 404)
        headers = {
            "cache-control": "no-store",
            "content-disposition": f"attachment; filename*=UTF-8''{quote(found.name)}",
        }
        parts: Iterator[bytes] = found.parts()
        return StreamingResponse(parts, media_type=found.kind, headers=headers)

    return [Route("/download/{token}", fetch, methods=["GET"])]
