"""The embedded model goes on with an answer as if nothing had interrupted it."""

import pytest

from app.service.session import Session
from engine.local import Local
from storage.database import Database
from tests.service.test_continuing import answer, ask, go_on, stored, wanted
from tests.support.inside import OWNER

pytestmark = pytest.mark.model
WHOLE, SEED = 48, 2


@pytest.mark.parametrize("method", ["plain", "hd"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_real_model_goes_on_to_the_token(embedded, method: str, temperature: float) -> None:
    found = []
    for cuts in ((WHOLE,), (11, 37), (1, 30, 17)):
        with Database() as db:
            session = Session(Local(backend=embedded), db)
            conversation, _ = ask(session, wanted(cuts[0], method, temperature, seed=SEED))
            for cut in cuts[1:]:
                # As after a restart: what was read is read again.
                session = Session(Local(backend=embedded), db)
                go_on(session, conversation, wanted(cut, method, temperature, seed=SEED))
            message, run = stored(session, conversation)
            found.append((message.content, [token.id for token in run.tokens]))
            session.chat.say(OWNER, conversation, "And then?")
            found[-1] += (answer(session, conversation, wanted(12, method, temperature)).text,)
    assert found[0] == found[1] == found[2] and len(found[0][1]) == WHOLE
