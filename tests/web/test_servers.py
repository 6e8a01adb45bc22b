"""The app with a model on a server: chat, Stop, errors, Compare, going on, what is stored.

The server is a stub on a real socket (tests/support/openai_stub.py).
"""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import httpx
import pytest

from app.service import why
from app.service.answering import Update
from app.service.comparison import Progress, Side
from app.service.current import line
from app.service.preferences import Preferences
from app.service.session import Session
from app.service.why import server_sentence
from app.web.run_html import heading, same_texts, two_servers
from app.web.tabs import compare
from engine.engine import Load, ServerCounted
from engine.errors import ModelError, PromptError, ServerError
from engine.local import Local
from engine.methods import METHODS, PLAIN
from engine.models.loaders import MODEL_LOADERS
from engine.servers.client import parsed
from engine.servers.served import ServedModel
from engine.settings import Generation, Sampling
from engine.types import Message
from storage.database import Database
from storage.traces import Traces
from tests.support.inside import SECONDS, updates_of
from tests.support.openai_stub import FORWARD, Stub, stub
from tests.support.toy import ToyBackend

OWNER = "local"
COLD = Preferences(Generation(Sampling(0.0), 32), fresh_seed=False)


@contextmanager
def on_toy() -> Iterator[Session]:
    with Database() as database, closing(Local(backend=ToyBackend())) as engine:
        yield Session(engine, database)


@contextmanager
def opened(server: Stub, key: str = "") -> Iterator[Session]:
    with on_toy() as session:
        session.models.give_key(server.base, key)
        list(session.models.load(server.base))
        yield session


def say(session: Session, text: str = "Hello", chosen: Preferences = COLD) -> tuple[str, Update]:
    id = session.chat.say(OWNER, None, text)
    return id, last(session, id, chosen)


def last(session: Session, id: str, chosen: Preferences = COLD) -> Update:
    *_, found = updates_of(session, OWNER, id, chosen)
    assert isinstance(found, Update)
    return found


def text_of(session: Session, id: str) -> str:
    return session.chat.conversations(OWNER).messages(id)[-1].content


# chat


def test_a_plain_server_answers_and_nothing_is_claimed_that_it_does_not_tell() -> None:
    with stub() as server, opened(server) as session:
        id, update = say(session)
        assert text_of(session, id) == "".join(f"word-{n} " for n in range(32))
        assert update.finish == "length" and update.metrics.tokens == 32
        assert update.metrics.share == {"unknown": 1.0} and update.metrics.accepted == {}
        assert update.metrics.plain_seconds is None and update.counted is None
        assert "does not report" in why.sentence(why.worth_of(update.metrics))
        assert line(session.current.info) == "The server does not report whether it drafts."
        (worth,) = Traces(session.database, OWNER).worths(id).values()
        assert not worth.known
        assert server.asked[-1]["temperature"] == 0.0 and server.asked[-1]["max_tokens"] == 32
        assert "logprobs" not in server.asked[-1] and "return_token_ids" not in server.asked[-1]


def test_a_server_with_our_drafter_tells_sources_steps_and_counters() -> None:
    with stub(strata=True) as server, opened(server) as session:
        id, update = say(session)
        figures = update.metrics
        assert figures.share == {"target": 0.25, "context": 0.5, "statistics": 0.25}
        assert figures.accepted == {"context": 16, "statistics": 8}
        assert figures.mean_acceptance_length == FORWARD and figures.plain_seconds is None
        assert [token.text for token in update.recorder.run.tokens][:2] == ["word-0 ", "word-1 "]
        assert 0.6 < update.recorder.run.tokens[0].probability < 0.61, "the exponential of -0.5"
        assert update.counted == ServerCounted(40, 24, 40)
        assert why.sentence(why.worth_of(figures)) == "24 of 32 tokens were guessed."
        assert "up to 3 tokens ahead" in line(session.current.info)
        store = Traces(session.database, OWNER)
        (run_id,) = store.worths(id)
        run = store.load(run_id)
        assert run.method == "server" and run.prefill is not None and run.prefill.tokens == 7
        assert run.settings["server"]["counted"] == {"drafted": 40, "accepted": 24, "own": 40}
        assert "drafting" not in run.settings, "what drafts there is not ours to set"
        text = server_sentence(run)
        assert text is not None and text in heading(store.get(run_id), run)
        assert "The server as a whole accepted 24 of 40 drafted tokens (60 %)" in text


def test_what_a_damaged_file_says_of_counters_is_left_out() -> None:
    with stub(strata=True) as server, opened(server) as session:
        _, update = say(session)
        run = update.recorder.run
        for wrong in (None, 3, {"drafted": "a"}, {"drafted": 3}):
            assert server_sentence(replace(run, settings={"server": {"counted": wrong}})) == ""
        assert server_sentence(replace(run, settings={})) is None


def test_a_second_turn_sends_the_whole_conversation() -> None:
    with stub(words=3) as server, opened(server) as session:
        id, _ = say(session)
        session.chat.say(OWNER, id, "And then?")
        last(session, id)
        roles = [message["role"] for message in server.asked[-1]["messages"]]
        assert roles == ["user", "assistant", "user"]


def test_stop_while_the_server_says_nothing_ends_at_once() -> None:
    with stub(hangs=0) as server, opened(server) as session:
        id = session.chat.say(OWNER, None, "Hello")

        def stop() -> None:
            server.silent.wait(SECONDS)
            session.tasks.stop(OWNER, id)

        threading.Thread(target=stop).start()
        assert list(updates_of(session, OWNER, id, COLD))[-1].finish == "cancelled"  # type: ignore[union-attr]
        assert server.silent.is_set() and server.left.wait(SECONDS)


# what goes wrong


def failed(session: Session) -> str:
    id = session.chat.say(OWNER, None, "Hello")
    with pytest.raises(ServerError) as found:
        list(updates_of(session, OWNER, id, COLD))
    assert session.chat.conversations(OWNER).messages(id)[0].content == "Hello"
    return str(found.value)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (401, "wants a key"),
        (404, "has nothing at this place"),
        (429, "accepts no more requests"),
        (500, "Look into its log"),
        (503, "Look into its log"),
        (400, "refused the request"),
        (307, "Give the address where the server really is"),
    ],
)
def test_a_refused_request_says_what_to_do(status: int, expected: str) -> None:
    with stub() as server, opened(server) as session:
        server.status = status
        message = failed(session)
        assert (
            expected in message and f"status {status}" in message and "as the test wants" in message
        )
        assert len(server.asked) == 1, "nobody else was asked, and not again"


def test_a_stream_that_breaks_off_keeps_what_came_and_can_go_on() -> None:
    with stub(strata=True, breaks=12) as server, opened(server) as session:
        id = session.chat.say(OWNER, None, "Hello")
        with pytest.raises(ServerError, match="broke off before the answer was over"):
            list(updates_of(session, OWNER, id, COLD))
        begun = "".join(f"word-{n} " for n in range(12))
        assert text_of(session, id) == begun
        server.breaks = None
        session.chat.continue_answer(OWNER, id)
        update = last(session, id)
        assert server.asked[-1]["continue_final_message"] is True
        assert server.asked[-1]["messages"][-1] == {"role": "assistant", "content": begun}
        assert text_of(session, id).startswith(f"{begun}word-0 ") and update.finish == "length"


def test_a_server_that_cannot_go_on_says_so_and_the_answer_stays() -> None:
    with stub(breaks=5) as server, opened(server) as session:
        id = session.chat.say(OWNER, None, "Hello")
        with pytest.raises(ServerError):
            list(updates_of(session, OWNER, id, COLD))
        before = text_of(session, id)
        session.chat.continue_answer(OWNER, id)
        with pytest.raises(ServerError, match="cannot continue an answer"):
            list(updates_of(session, OWNER, id, COLD))
        assert text_of(session, id) == before != ""


def test_a_refusal_within_the_stream_leaves_the_parameter_out_too() -> None:
    with (
        stub(strata=True, refuses=("min_p",), streams_refusals=True) as server,
        opened(server) as session,
    ):
        chosen = replace(COLD, generation=Generation(Sampling(0.5, min_p=0.1), 8))
        server.unless = 0
        assert say(session, chosen=chosen)[1].metrics.tokens == 8
        assert [body["min_p"] for body in server.asked] == [0.1, 0]
        server.unless = None
        assert "status 400" in failed(session), "refused again, it is not asked for ever"


def test_an_error_within_the_stream_is_reported() -> None:
    with stub() as server, opened(server) as session:
        server.part = lambda *_: 'data: {"error": {"message": "out of memory"}}\n\n'  # type: ignore[method-assign]
        assert "out of memory" in failed(session)
        server.part = lambda *_: "data: {nonsense\n\n"  # type: ignore[method-assign]
        assert "is no OpenAI-compatible server" in failed(session)


def test_a_server_that_is_gone_is_reported_and_comes_back() -> None:
    with stub(words=3) as server, opened(server) as session:
        assert isinstance(session.engine, Local)
        served = session.engine.loaded.backend
        assert isinstance(served, ServedModel)
        there = served.access
        served.access = replace(there, address=parsed(f"http://127.0.0.1:{free_port()}/v1"))
        assert "the connection was refused" in failed(session)
        served.access = there
        assert say(session)[1].finish == "eos"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# loading


def unloadable(source: str) -> str:
    with on_toy() as session:
        before = session.current.info
        with pytest.raises(ModelError) as found:
            list(session.models.load(source))
        assert session.current.info == before and session.models.is_loaded
        return str(found.value)


def test_a_server_that_cannot_be_reached_leaves_the_old_model() -> None:
    assert "the connection was refused" in unloadable(f"http://127.0.0.1:{free_port()}/v1")
    assert "no machine with the name" in unloadable("http://nowhere.invalid:8000/v1")


def test_a_server_that_is_none_leaves_the_old_model() -> None:
    with stub() as server:
        assert "it has no model 'other', but 'stub-model'" in unloadable(f"{server.base}#other")
        assert "nothing at this place (status 404)" in unloadable(f"{server.address}/elsewhere")


def test_a_certificate_that_is_not_trusted_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object, **__: object) -> None:
        error = ssl.SSLCertVerificationError(1, "self-signed certificate")
        error.verify_message = "self-signed certificate"
        try:
            raise error
        except ssl.SSLError as cause:
            raise httpx.ConnectError("failed") from cause

    monkeypatch.setattr("httpx.HTTPTransport.handle_request", wrong)
    shown = unloadable("https://127.0.0.1:9/v1")
    assert "self-signed certificate" in shown and "SSL_CERT_FILE" in shown


def test_a_plain_http_server_at_an_https_address_is_reported() -> None:
    with stub() as server:
        shown = unloadable(server.base.replace("http:", "https:"))
        assert "the server may want http" in shown


def test_a_key_opens_a_server_and_is_kept_nowhere() -> None:
    with stub(key="hush-hush") as server:
        assert "wants a key (status 401)" in unloadable(server.base)
        with opened(server, "hush-hush") as session:
            assert say(session)[1].finish == "length"
            with session.database.write() as handle:
                assert "hush-hush" not in "".join(handle.conn.iterdump())
            session.models.keys.clear()
            session.models.give_key(server.base, "wrong-key")
            with pytest.raises(ModelError, match="refused the key") as found:
                list(session.models.load(f"{server.base}#stub-model"))
            assert "wrong-key" not in str(found.value)


def test_a_key_goes_to_its_own_server_alone() -> None:
    with stub(key="hush") as one, stub() as other, opened(one, "hush") as session:
        assert session.models.key_of(one.base) == "hush"
        assert session.models.key_of(other.base) == "" == session.models.key_of("owner/name")


def test_no_server_is_asked_before_it_is_loaded() -> None:
    with stub() as server, on_toy() as session:
        assert session.models.add(server.base) == server.base
        assert server.base in [each.source for each in session.models.candidates()]
        assert session.engine.need(server.base, session.models.runtime).total == 0
        assert server.paths == []


def test_parameters_that_a_server_does_not_take_are_left_out_and_reported_once() -> None:
    chosen = replace(COLD, generation=Generation(Sampling(0.5, top_k=5, min_p=0.1), 8))
    with stub(refuses=("stream_options", "min_p")) as server, opened(server) as session:
        assert say(session, chosen=chosen)[1].finish == "length"
        notices = list(session.notices.take(OWNER))
        assert len(notices) == 1 and "does not take Min-p" in notices[0]
        assert "min_p" not in server.asked[-1] and server.asked[-1]["top_k"] == 5
        say(session, chosen=chosen)
        assert len(server.asked) == 4 and session.notices.take(OWNER) == []


# Compare


def compared(session: Session, left: Side, right: Side) -> Progress:
    items = session.proofs.compare_sides(OWNER, "Hello", "", (left, right), 2)
    return [item for item in items if isinstance(item, Progress)][-1]


def test_another_text_of_a_server_is_no_fault() -> None:
    with stub(strata=True) as server, opened(server) as session:
        sides = Side(PLAIN, COLD.generation), Side(METHODS["auto"], COLD.generation)
        found = compared(session, *sides)
        (left, right), *_ = found.pairs
        cut = replace(right, steps=right.steps[:-2])
        text = compare.banner(session, replace(found, pairs=((left, cut),)), 1)
        assert "Different text" in text and "differs" not in text


@pytest.mark.soak
def test_a_server_that_cannot_be_switched_is_compared_with_a_second_address() -> None:
    with stub() as fast, stub(pace=0.01) as slow, opened(slow) as session:
        for _ in session.models.load(fast.base):
            pass
        plain, usual = Side(PLAIN, COLD.generation), Side(METHODS["auto"], COLD.generation)
        with pytest.raises(PromptError, match="at a second address"):
            compared(session, plain, usual)
        found = compared(session, replace(plain, source=slow.base), usual)
        assert two_servers(found) and same_texts(found) == "Two servers, the same text"
        assert "Two servers, the same text" in compare.banner(session, found, 2)
        assert session.models.source == fast.base


# what needs a model on this machine


def test_what_needs_a_model_here_says_so() -> None:
    with stub(strata=True) as server, opened(server) as session:
        id, _ = say(session)
        with pytest.raises(PromptError, match="came from a server"):
            list(session.proofs.prove(OWNER, id))
        for act in (
            lambda: session.entries.find(OWNER, id, "some words"),
            session.costs.measure,
            lambda: list(session.engine.load_drafts([("small", "small.gguf")])),
        ):
            with pytest.raises(ModelError, match="needs a model on this machine"):
                act()
        assert session.chat.counts(["four characters"]) == [(4, False)], "an estimate"
        assert session.engine.measure([Message("user", "four")]).room == 2048


def test_a_model_of_this_machine_takes_the_place_of_a_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with stub(words=3) as server, opened(server) as session:
        say(session)
        toys = replace(MODEL_LOADERS, load=lambda *_: ToyBackend())
        monkeypatch.setattr(session.engine, "loaders", toys)
        list(session.engine.load(Load("toy")))
        id, update = say(session)
        assert update.metrics.share.keys() <= {"target", "context", "model"}
        assert Traces(session.database, OWNER).load(update.recorder.run_id).method == "auto"
