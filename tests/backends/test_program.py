"""Real models in the running app: one after the other, each says what it says alone; and an answer
that was interrupted goes on to the token."""

import weakref
from pathlib import Path
from typing import Any

import pytest

from app.arguments import EMBEDDED
from app.service import models
from app.service.session import Session
from engine.local import Local
from engine.settings import Runtime, Sampling
from storage.database import Database
from tests.service.test_continuing import answer, go_on, stored, wanted
from tests.service.test_continuing import ask as begin
from tests.service.test_models import ask, fails, load_model, loaded
from tests.support.inside import OWNER, local


def gain(session: Session, drafts: list[str]) -> None:
    """Load and profile these draft models, and see that they draft and change no word."""
    session.stacks.load(drafts)
    list(session.stacks.profile(Sampling(0.8), ("Tell me a story.",), 24))
    found = ask(session, "Tell me a story.", "hsd:small@3/mid@2", budget="fixed")
    assert found.text == ask(session, "Tell me a story.", "plain").text
    assert sum(found.metrics.accepted.values()) > 0


@pytest.mark.soak
@pytest.mark.gguf
@pytest.mark.model
def test_folders_and_files_take_turns_and_draft_for_each_other(
    db: Database, tmp_path: Path
) -> None:
    cpu = Runtime(device="cpu", dtype="float32", threads=1, context_length=512, bits="off")
    folder, file = str(EMBEDDED), str(models.EMBEDDED_FILE)
    small, mid = (str(EMBEDDED.with_name(name)) for name in ("small", "mid"))
    session = Session(Local(), db)
    list(session.models.start(file, cpu))
    assert session.models.demonstration and session.current.info.kind == "llama.cpp"
    assert session.current.info.name == "tiny-chat"
    text = ask(session, "Tell me a story.").text
    gain(session, [small, f"{mid}.gguf"])
    old = [weakref.ref(backend) for backend in (loaded(session), *local(session).drafts.values())]
    load_model(session, folder, cpu)
    assert [ref() for ref in old] == [None] * 3
    gain(session, [f"{small}.gguf", mid])
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(Path(file).read_bytes()[:100_000])
    assert "cut.gguf' cannot be used" in fails(session, str(cut), cpu)
    assert session.models.source == folder and ask(session, "Tell me a story.").text
    load_model(session, file, cpu)
    assert ask(session, "Tell me a story.").text == text


@pytest.mark.soak(stay=1)
@pytest.mark.model
@pytest.mark.parametrize("method", ["plain", "hd"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_real_model_goes_on_to_the_token(embedded: Any, method: str, temperature: float) -> None:
    found, whole = [], 48
    for cuts in ((whole,), (11, 37), (1, 30, 17)):
        with Database() as db:
            session = Session(Local(backend=embedded), db)
            conversation, _ = begin(session, wanted(cuts[0], method, temperature, seed=2))
            for cut in cuts[1:]:
                # As after a restart: what was read is read again.
                session = Session(Local(backend=embedded), db)
                go_on(session, conversation, wanted(cut, method, temperature, seed=2))
            message, run = stored(session, conversation)
            found.append((message.content, [token.id for token in run.tokens]))
            session.chat.say(OWNER, conversation, "And then?")
            found[-1] += (answer(session, conversation, wanted(12, method, temperature)).text,)
    assert found[0] == found[1] == found[2] and len(found[0][1]) == whole
