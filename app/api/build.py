"""The API of a running program, put together."""

from app.api.gate import Gate
from app.api.routes import Api
from app.api.running import Service
from app.arguments import Options
from app.service.session import Session
from storage.api_keys import ApiKeys


def api_of(session: Session, options: Options) -> Api:
    """The API of a session, as it was asked for on the command line.

    It is on where that says so. Else the owner's choice counts, where nobody else can come in.
    """
    keys = ApiKeys(session.database)
    private = not options.public and options.password is None

    def on() -> bool:
        return options.api or (not options.public and keys.on)

    gate = Gate(keys, private, on)
    service = Service(session.engine, session.programs)
    return Api(service, gate, lambda: session.revival.coming)
