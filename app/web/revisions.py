"""How far a conversation has changed, as a number: pages that show it compare theirs.

`GET /revision/<name>`: see app/service/watches.py. It is asked every few seconds by a page that is
looked at, so it does no more than read that number.
"""

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from app.http.login import logged_in
from app.service.session import Session
from engine.errors import StorageError

UNKNOWN = "There is no such conversation. It may be deleted."
FRESH = {"cache-control": "no-store"}


def routes(session: Session) -> list[Route]:
    """The route by which pages ask."""

    def revision(request: Request) -> Response:
        if not logged_in(request.app, request.cookies):
            return PlainTextResponse("Log in first.", 401)
        place = session.watches.place(request.path_params["name"])
        if place is None:
            return PlainTextResponse(UNKNOWN, 404)
        try:
            return PlainTextResponse(str(session.chat.revision(*place)), headers=FRESH)
        except StorageError:
            return PlainTextResponse(UNKNOWN, 404)

    return [Route("/revision/{name}", revision, methods=["GET"])]
