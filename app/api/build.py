"""The API of a running program, put together."""

from app.api.gate import Gate
from app.api.routes import Api
from app.api.running import Service
from app.arguments import Options
from app.service.session import Session


def api_of(session: Session, options: Options) -> Api:
    """The API of a session, as it was asked for on the command line."""
    programs = session.programs
    programs.always = options.api
    private = not options.public and options.password is None
    gate = Gate(programs.keys, private, lambda: programs.on)
    return Api(Service(session.engine, programs), gate, lambda: session.revival.coming)
