"""The drafter that vLLM loads, asked with the exact types of vLLM's interface."""

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.vllm.attached import FILE, Attached, Learned, attached
from app.vllm.followed import GONE, RECORDS
from app.vllm.proposer import Extension, Proposer
from engine.drafting.chains import grow_chains
from engine.errors import SettingError
from engine.types import CONTEXT, MODEL, TARGET
from tests.support.vllm_rows import LONGEST, Batch, Request, config

CYCLE = 7


def circling(tokens: Sequence[int]) -> int:
    """A target that counts up and begins again, and says 8 now and then."""
    return 8 if len(tokens) % 23 == 0 else (tokens[-1] + 1) % CYCLE


def prompt(begin: int, size: int = 16) -> list[int]:
    """A prompt of the same kind."""
    return [(begin + at) % CYCLE for at in range(size)]


def request(name: str, begin: int = 0, **given: int) -> Request:
    return Request(name, prompt(begin), **given)


def started(*requests: Request, **settings: int) -> tuple[Proposer, Batch]:
    """A drafter, and rows in which these requests are."""
    proposer = Proposer(config(**settings))
    batch = Batch(proposer, circling)
    for one in requests:
        batch.add(one)
    return proposer, batch


def plain(one: Request, size: int) -> list[int]:
    """The request's tokens as a target without drafts says them."""
    tokens = list(one.tokens)
    while len(tokens) < size:
        tokens.append(circling(tokens))
    return tokens


def test_drafts_are_right_tokens_and_save_forwards() -> None:
    one = request("a")
    _, batch = started(one)
    said = plain(one, 200)
    steps = 0
    while len(one.tokens) < 150:
        batch.step()
        steps += 1
    assert one.tokens == said[: len(one.tokens)] and steps < 60


def test_a_prompt_that_is_still_read_has_no_drafts_and_is_no_sequence_yet() -> None:
    proposer, batch = started(request("a", unread=3))
    for _ in range(3):
        assert batch.step() == [[]] and batch.requests[0].drafts == []
        assert not proposer.sequences.present
    batch.step()
    assert batch.requests[0].drafts and len(proposer.sequences.present) == 1


def test_the_tokens_before_the_last_one_were_drafts() -> None:
    one = request("a")
    proposer, batch = started(one)
    wanted: list[str] = []
    steps = []
    for _ in range(25):
        said = batch.step()[0]
        steps.append(len(said))
        wanted += [CONTEXT] * (len(said) - 1) + [TARGET]
    told = proposer.sources(prompt(0), one.tokens[16:])
    assert told["sources"] == wanted and told["steps"] == steps and CONTEXT in wanted
    figures = proposer.show(None)["figures"]
    assert figures[CONTEXT]["accepted"] == wanted.count(CONTEXT)
    assert told["drafted"] == figures[CONTEXT]["drafted"] >= wanted.count(CONTEXT)
    # Of an answer that ended within its last step, the rest of that step is not asked for.
    cut = proposer.sources(prompt(0), one.tokens[16:-1])
    assert cut["sources"] == wanted[:-1] and sum(cut["steps"]) == len(wanted) - 1


def test_what_was_never_seen_is_not_known() -> None:
    one = request("a")
    proposer, batch = started(one)
    batch.step()
    unknown = {"sources": [None, None], "steps": [], "drafted": 0}
    assert proposer.sources([1, 2, 3], [4, 5]) == unknown
    assert proposer.sources(prompt(0), [9, 9]) == unknown
    assert proposer.sources(prompt(0), []) == {"sources": [], "steps": [], "drafted": 0}
    known = proposer.sources(prompt(0), [*one.tokens[16:], 3])
    assert known["sources"] == [TARGET, None] and known["steps"] == [1]


def test_rows_that_move_stay_the_same_sequences() -> None:
    many = [request(str(n), n) for n in range(5)]
    proposer, batch = started(*many)
    batch.steps(3)
    batch.remove(many[0])  # the last one is in its place now
    assert batch.requests[0] is many[4]
    before = {id(each) for each in proposer.sequences.present.values()}
    batch.steps(3)
    assert {id(each) for each in proposer.sequences.present.values()} == before
    for one in many[1:]:
        begin = one.tokens[:16]
        assert None not in proposer.sources(begin, one.tokens[16:])["sources"]


def test_equal_requests_side_by_side_are_two_sequences() -> None:
    proposer, batch = started(request("a"), request("b"))
    for _ in range(8):
        batch.step()
        assert len(proposer.sequences.present) == 2
        assert batch.requests[0].tokens == batch.requests[1].tokens


def test_another_request_in_the_row_of_one_that_ended_is_a_new_sequence() -> None:
    first = request("a", 1)
    proposer, batch = started(first)
    batch.steps(4)
    batch.remove(first)
    second = Request("b", [20, 21, 22, 23] * 4)
    batch.add(second)
    batch.step()
    assert len(proposer.sequences.present) == 2
    assert proposer.sources([20, 21, 22, 23] * 4, second.tokens[16:])["sources"] == [TARGET]


def test_an_answer_that_is_over_is_known_to_the_next_conversation() -> None:
    proposer = Proposer(config())
    batch = Batch(proposer, lambda tokens: 30 + (len(tokens) - 16) % 12)
    first = Request("a", [20, 21, 22, 23] * 4)
    batch.add(first)
    batch.steps(8)
    batch.remove(first)
    batch.add(Request("b", [40, 41, 42, 43] * 4))
    drafted = []
    for _ in range(GONE + 6):
        batch.step()
        drafted.append(proposer.drafted[MODEL])
    assert drafted[0] == 0 < drafted[-1] and proposer.accepted[MODEL]


def test_a_preempted_request_comes_back_in_another_row_as_itself() -> None:
    one, other = request("a", 2), request("b", 3)
    proposer, batch = started(one, other)
    batch.steps(4)
    batch.remove(one)
    batch.steps(3 * GONE)
    one.unread = 2  # all of it is read again
    batch.add(one)
    batch.steps(6)
    assert len(proposer.sequences.present) == 2
    sources = proposer.sources(prompt(2), one.tokens[16:])["sources"]
    assert None not in sources and one.tokens == plain(request("a", 2), len(one.tokens))
    (found,) = (each for each in proposer.sequences.present.values() if each.tokens == one.tokens)
    assert found.learned < len(one.tokens)  # what came later is still to be learned


def test_steps_that_were_not_shown_are_unknown() -> None:
    one = request("a")
    proposer, batch = started(one)
    batch.step()
    said = len(one.tokens)
    batch.step(ask=False)
    missed = len(one.tokens) - said
    batch.step(ask=False)
    missed = len(one.tokens) - said
    batch.step()
    told = proposer.sources(prompt(0), one.tokens[16:])
    assert told["sources"].count(None) == missed >= 2
    assert sum(told["steps"]) == len(one.tokens) - 16 - missed


def test_two_ranks_decide_the_same() -> None:
    """Each rank has a drafter of its own, and sees the same rows."""
    draw = random.Random(11)
    ranks = [Proposer(config(rank=rank)) for rank in range(2)]

    class Both:
        def propose(self, sampled, lengths, rows, slot_mappings=None):  # type: ignore[no-untyped-def]
            first, second = (rank.propose(sampled, lengths, rows) for rank in ranks)
            assert first == second
            return first

    batch, number = Batch(Both(), circling), 0
    for _ in range(120):
        if len(batch.requests) < 6 and draw.random() < 0.3:
            number += 1
            batch.add(request(str(number), draw.randrange(5), unread=draw.randrange(3)))
        for one in list(batch.requests):
            if len(one.tokens) > 100 or draw.random() < 0.05:
                batch.remove(one)
        batch.step()
    assert ranks[0].drafted == ranks[1].drafted and sum(ranks[0].drafted.values()) > 50
    rows = [rank.databases.calibration.rows() for rank in ranks]
    assert rows[0] == rows[1] and rows[0]


def test_drafts_end_where_the_context_does() -> None:
    one = Request("a", prompt(0, LONGEST - 60))
    _, batch = started(one, tokens=6)
    most = 0
    while len(one.tokens) < LONGEST - 2:
        batch.step()
        most = max(most, len(one.drafts))
        assert len(one.drafts) <= max(0, LONGEST - len(one.tokens) - 1)
    assert most == 6


def test_no_token_beyond_the_vocabulary_is_drafted() -> None:
    one = request("a")
    _, batch = started(one, vocabulary=5)
    for _ in range(20):
        batch.step()
        assert max([0, *one.drafts]) < 5


def test_a_request_may_say_that_it_wants_no_drafts() -> None:
    one, other = request("a"), request("b", 2)
    proposer, batch = started(one, other)
    said = {
        "a": SimpleNamespace(sampling_params=SimpleNamespace(extra_args={"strata": "off"})),
        "b": SimpleNamespace(sampling_params=SimpleNamespace(extra_args=None)),
    }
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=["a", "b"]), requests=said, drafter=proposer
    )
    worker = Extension()
    worker.model_runner = runner
    figures = worker.strata_figures()
    assert figures is not None and figures["drafting"] and figures["draft_tokens"] == 4
    assert figures["databases"] == [CONTEXT, MODEL]  # there are no statistics
    for _ in range(6):
        batch.step()
        assert one.drafts == []
    assert other.drafts and len(proposer.sequences.present) == 1
    assert worker.strata_sources(prompt(2), other.tokens[16:17])["sources"] == [TARGET]


def test_workers_on_processors_try_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[bool]()
    monkeypatch.setattr("app.vllm.proposer.fix_sampler", lambda: tried.append(True))
    made = config()
    Proposer(made).load_model(object())
    assert not tried
    made.device_config.device_type = "cpu"
    Proposer(made).load_model(object())
    assert tried == [True]


def test_a_worker_without_our_drafter_says_nothing() -> None:
    worker = Extension()
    worker.model_runner = SimpleNamespace()
    assert worker.strata_figures() is None and worker.strata_sources([1], [2]) is None


def test_who_finds_nothing_looks_less_often_and_begins_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Looking takes time too: a text in which nothing is to be found must not pay for it."""
    proposer, looked = Proposer(config(vocabulary=1000)), [0]

    def counting(asked: Sequence[object], cost: object) -> object:
        looked[0] += len(asked)
        return grow_chains(asked, cost)  # type: ignore[arg-type]

    monkeypatch.setattr("app.vllm.proposer.grow_chains", counting)
    draw = random.Random(2)
    fresh = iter(draw.sample(range(1000), 900))
    batch, one = Batch(proposer, lambda tokens: next(fresh)), request("a")
    batch.add(one)
    batch.steps(200)
    assert looked[0] < 60 and sum(proposer.accepted.values()) == 0
    batch.choose = circling
    batch.steps(40)
    looked[0] = 0
    batch.steps(20)
    assert looked[0] == 20 and one.drafts


def test_a_fault_ends_drafting_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = request("a")
    proposer, batch = started(one)
    batch.step()

    def broken(*_: object) -> None:
        raise RuntimeError("the disk is gone")

    monkeypatch.setattr("app.vllm.proposer.grow_chains", broken)
    for _ in range(3):
        batch.step()
        assert one.drafts == []
    said = proposer.show(None)
    assert said["drafting"] is False and said["problem"] == "RuntimeError: the disk is gone"
    assert "switched off" in caplog.text and caplog.text.count("Traceback") == 1


def test_what_was_said_long_ago_is_forgotten() -> None:
    proposer = Proposer(config())
    batch = Batch(proposer, circling)
    for number in range(RECORDS + 20):
        one = Request(str(number), [number % 50, number // 50, *prompt(0)])
        batch.add(one)
        batch.step()
        batch.remove(one)
    present = proposer.sequences.present.values()
    assert len(present) <= RECORDS + GONE
    assert sum(each.drafter is not None for each in present) < 30
    assert len(proposer.sequences.rows) <= 8


def test_what_was_learned_is_there_after_a_start(tmp_path: Path) -> None:
    kept = {"folder": str(tmp_path), "model": "m"}
    for rank, learns in ((1, False), (0, True)):
        proposer = Proposer(config(rank=rank, **kept))
        batch, one = Batch(proposer, circling), request("a")
        batch.add(one)
        batch.steps(6)
        batch.remove(one)
        batch.add(request("b", 3))
        batch.steps(GONE + 1)
        if proposer.learned.thread is not None:
            proposer.learned.thread.shutdown()
        again = Learned(Attached(**kept), writes=False)
        assert [bool(found) for found in again.load()] == [learns, learns]
    assert not Learned(Attached(folder=str(tmp_path), model="other"), writes=False).load()[0]
    assert (tmp_path / FILE).is_file()
    next_one = Proposer(config(**kept))
    assert next_one.databases.learned.size and next_one.databases.calibration.rows()


def test_the_store_is_made_before_anyone_reads_it(tmp_path: Path) -> None:
    Learned(Attached(folder=str(tmp_path / "new")), writes=False).prepare()
    assert (tmp_path / "new" / FILE).is_file()
    Learned(Attached(), writes=False).prepare()


def test_what_is_attached_travels_as_plain_values() -> None:
    made = Attached(databases=(MODEL, CONTEXT), folder="/x", model="m", rows=9.0)
    assert attached({"strata": made.values()}) == made
    assert attached({}) == attached(None) == Attached()
    assert made.learned == Path("/x") / FILE and made.table is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"databases": ("context", "memory")}, "'memory' cannot draft. Choose from: context"),
        ({"databases": ()}, "no database cannot draft"),
        ({"rows": 0.0}, "twice the time at 0.0 rows"),
    ],
)
def test_what_cannot_be_attached_is_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        Attached(**wrong)  # type: ignore[arg-type]


def test_statistics_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    damaged = tmp_path / "x.db"
    damaged.write_bytes(b"no database")
    proposer = Proposer(config(statistics=str(damaged)))
    proposer.load_model()
    assert proposer.names == [CONTEXT, MODEL]
