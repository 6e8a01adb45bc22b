"""The methods that Settings offers: those that need a head, where there is one."""

from app.service.session import Session
from app.web.tabs.settings import methods, usable
from engine.backends.toy import ToyBackend, deviating
from engine.local import Local
from engine.methods import offered
from storage.database import Database


def test_methods_with_a_head_are_offered_where_there_is_one(db: Database) -> None:
    needing = {"head", "hd+head"}
    with_head = ToyBackend(guesses=deviating(0.5))
    for toy, there in ((with_head, needing), (ToyBackend(), set[str]())):
        session = Session(Local(backend=toy), db)
        names = {name for _, name in methods(session)}
        assert names & needing == there and {"auto", "hd", "plain"} <= names
        assert {method.name for method in offered(toy.info)} & needing == there
        assert usable(session, "head@2") == usable(session, "hd+head") == bool(there)
