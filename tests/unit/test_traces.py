"""Runs and steps: what is read equals what was saved, owners apart, the oldest dropped."""

import random
from collections import Counter
from dataclasses import astuple, fields, replace
from types import MappingProxyType
from typing import Any

import pytest

from engine.errors import StorageError
from engine.metrics import summarise
from engine.types import TARGET, Costs, Learned, Part, Prefill, Run, Step, Token
from storage import deletions
from storage.conversations import Conversations
from storage.database import Database
from storage.machine import CostStore
from storage.steps import POINTS, Point, digest
from storage.traces import Filter, Trace, Traces, Worth

STEPS = (
    Step(
        index=0,
        tokens=(
            Token(5, 100, "context", 8, "Hel", probability=0.1 + 0.2),
            Token(2**31, 101, "draft:<b>tiny</b>", 0, "<i>\x00\ud800", probability=1e-300),
            Token(7, 102, "target", 0, "", probability=1.0),
        ),
        proposed={"context": 3, "draft:<b>tiny</b>": 4},
        accepted={"context": 1, "draft:<b>tiny</b>": 1},
        by_depth=((3, 1), (4, 1)),
        draft_seconds=0.001,
        verify_seconds=0.1 + 0.7,
        sample_seconds=1e-9,
        other_seconds=0.0,
        look_ups={"context": 1e-5},
        levels={"draft:<b>tiny</b>": (4, 3, 2)},
        finish="length",
        plain_seconds=0.1 + 0.7,
        beside=2,
        tree=b"\x00\xff" * 6,
    ),
    Step(index=1, tokens=(Token(2, 103, "target"),), finish="eos"),
)


RUN = Run(
    method="hd",
    model="toy",
    fingerprint="f",
    settings={"tiers": ["context"], "temperature": 0.0},
    prefill=Prefill(12, 3, 0.1 + 0.2, 0.1 + 0.1),
    steps=STEPS,
    learned=Learned(1e-3),
    parts=(
        Part(1, "plain", "other", "g", {"temperature": 1.0}, Prefill(19, 12, 0.1 + 0.7, 1e-9)),
        Part(3, "hd", "toy", "f", {}, Prefill(25, 0, 0.25)),
    ),
)


def save(traces: Traces, **changes: Any) -> Trace:
    """The run above, or one that differs from it, saved."""
    placed = {name: changes.pop(name) for name in ("conversation_id", "kind") if name in changes}
    return traces.get(traces.save(replace(RUN, **changes), **placed))


@pytest.fixture
def traces(db: Database) -> Traces:
    return Traces(db, "ada")


def test_a_run_comes_back_equal_timings_included(traces: Traces) -> None:
    found = traces.load(traces.save(RUN))
    assert found == RUN
    assert astuple(found) == astuple(RUN), "comparing leaves timings out"
    # What has not begun yet has no prompt either, and what broke off is not learned.
    bare = Run(prefill=Prefill(0, 0), settings={"stop": ["a", "b"]})
    given = replace(bare, settings=MappingProxyType({"stop": ("a", "b")}))
    assert traces.load(traces.save(given)) == bare
    step = Step(0, (), Counter({"model": 2}), MappingProxyType({"model": 1}))
    plain = Step(0, (), {"model": 2}, {"model": 1})
    assert traces.load(save(traces, steps=(step,)).id).steps == (plain,), "any mapping may count"


def test_the_history_has_a_line_of_it(traces: Traces) -> None:
    trace = save(traces, kind="compare")
    assert (trace.kind, trace.model, trace.fingerprint, trace.method) == (
        "compare", "toy", "f", "hd",
    )  # fmt: skip
    assert (trace.emitted_tokens, trace.forwards) == (4, 2)
    assert trace.decode_seconds == sum(step.seconds for step in STEPS)
    assert (trace.speedup, trace.decode_speedup, trace.conversation_id) == (None, None, None)
    assert traces.history() == [trace]


def test_a_run_that_grows_ends_as_if_it_had_been_saved_at_once(traces: Traces) -> None:
    """Its sums too; a cancelled step is no forward."""
    ended = Step(2, (), finish="cancelled", verify_seconds=9.0)
    begun = replace(RUN, steps=STEPS[:1], learned=None)
    id = traces.save(begun)
    assert traces.load(id) == begun
    traces.extend(id, STEPS[1:])
    traces.extend(id, [ended], RUN.learned)
    whole = replace(RUN, steps=(*STEPS, ended))
    at_once = traces.get(traces.save(whole))
    assert traces.load(id) == whole and astuple(traces.load(id)) == astuple(whole)
    assert replace(traces.get(id), id=at_once.id, created=at_once.created) == at_once


def test_what_a_run_was_worth_is_noted_later_by_its_owner_alone(
    db: Database, traces: Traces
) -> None:
    run, other = save(traces), save(traces)
    Traces(db, "bob").note(run.id, 9.0, 9.0)
    traces.note("gone", 9.0, 9.0)
    assert traces.get(run.id) == run
    traces.note(run.id, 1.5, None)
    assert traces.get(run.id) == replace(run, speedup=1.5)
    assert traces.get(other.id) == other


def test_the_run_above_fills_every_field() -> None:
    """So a field added to the engine's values cannot be left out of storage unnoticed."""
    blank = Step(index=-1, tokens=(Token(-1, -1, ""),), other_seconds=-1.0)
    pairs: tuple[tuple[Any, Any], ...] = (
        (RUN, Run()),
        (RUN.prefill, Prefill(0, 0)),
        (RUN.learned, Learned()),
        (RUN.parts[0], Part(-1, "", "", "", {}, Prefill(0, 0))),
        (STEPS[0], blank),
        (STEPS[0].tokens[0], blank.tokens[0]),
    )
    for full, empty in pairs:
        # What only programs ask for is kept nowhere.
        for item in (item for item in fields(full) if item.name not in ("likeliest", "start")):
            assert getattr(full, item.name) != getattr(empty, item.name), item.name


def test_a_run_that_fails_to_save_leaves_nothing(db: Database, traces: Traces) -> None:
    with pytest.raises(Exception, match="UNIQUE|PRIMARY"):
        save(traces, steps=(STEPS[0], STEPS[0]))
    assert traces.history() == []
    assert db.execute_read("SELECT count(*) FROM steps") == [(0,)]


def test_history_is_newest_first_and_the_oldest_runs_are_dropped(
    db: Database, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Traces, "KEPT", 3)
    theirs = save(Traces(db, "bob"))
    runs = [save(traces, method=f"m{n}") for n in range(5)]
    assert traces.history() == runs[:1:-1] and traces.history(2) == runs[:2:-1]
    assert traces.history(0) == traces.history(-1) == []
    assert Traces(db, "bob").history() == [theirs]
    assert db.execute_read("SELECT count(DISTINCT run) FROM steps") == [(4,)]
    with pytest.raises(StorageError, match="There is no run"):
        traces.get(runs[0].id)


def test_a_run_lives_as_long_as_its_message(
    db: Database, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Traces, "KEPT", 1)
    store = Conversations(db, "ada")
    id = store.create().id
    run = save(traces, conversation_id=id)
    answer = store.append(id, "assistant", "Hel", run.id)
    newer = save(traces)
    assert traces.history() == [newer, run]
    token = store.delete_message(id, answer.id)
    newest = save(traces)
    assert traces.history() == [newest]
    store.undo(token)
    assert traces.history() == [newest, run], "it came back with its message"
    store.delete_message(id, answer.id)
    deletions.purge(db, 0.0)
    assert traces.history() == [newest]
    assert db.execute_read("SELECT DISTINCT run FROM steps") == [(newest.id,)]


def test_another_owners_run_does_not_exist(db: Database, traces: Traces) -> None:
    run, bob = save(traces), Traces(db, "bob")
    for id in (run.id, "unknown"):
        for act in (
            bob.get,
            bob.load,
            bob.steps,
            bob.step_count,
            bob.stored_prompt,
            bob.prompt,
            lambda id: bob.extend(id, STEPS),
            lambda id: bob.continue_run(id, STEPS[-1], RUN.parts[0]),
        ):
            with pytest.raises(StorageError, match="There is no run"):
                act(id)
    assert bob.history() == []


def test_a_run_belongs_to_a_conversation_of_its_owner(db: Database, traces: Traces) -> None:
    id = Conversations(db, "ada").create().id
    run = save(traces, conversation_id=id)
    assert traces.get(run.id).conversation_id == id
    for foreign in (Traces(db, "bob"), traces):
        with pytest.raises(StorageError, match="There is no conversation"):
            save(foreign, conversation_id=id if foreign is not traces else "unknown")
    Conversations(db, "ada").delete(id)
    assert traces.history() == []
    for reach in (traces.get, traces.load, lambda id: traces.extend(id, STEPS)):
        with pytest.raises(StorageError, match="There is no run"):
            reach(run.id)
    deletions.purge(db, 0.0)
    assert db.execute_read("SELECT count(*) FROM steps") == [(0,)]


DAMAGE = ["'['", "x'00ff'", "'text'"]


@pytest.mark.grid(1)
@pytest.mark.parametrize("column", ["emitted_tokens", "decode_seconds", "created", "speedup"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_line_is_reported_and_left_out(
    db: Database, traces: Traces, column: str, damage: str
) -> None:
    sound, damaged = save(traces), save(traces)
    with db.write() as handle:
        handle.execute(f"UPDATE runs SET {column} = {damage} WHERE id = ?", [damaged.id])
    with pytest.raises(StorageError, match="is damaged in the database"):
        traces.get(damaged.id)
    assert traces.history() == [sound]


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    "column",
    [
        "runs.prompt_tokens", "runs.prefill_seconds", "runs.plain_prefill_seconds",
        "runs.learning_seconds", "steps.tokens", "steps.proposed", "steps.accepted",
        "steps.by_depth", "steps.look_ups", "steps.levels", "steps.draft_seconds",
        "steps.plain_seconds",
    ],
)  # fmt: skip
@pytest.mark.parametrize("damage", [*DAMAGE, "'[7]'", '\'{"a":"b"}\'', f"'{'[' * 9999}'"])
def test_a_damaged_run_is_named(db: Database, traces: Traces, column: str, damage: str) -> None:
    run, (table, name) = save(traces), column.split(".")
    with db.write() as handle:
        handle.execute(f"UPDATE {table} SET {name} = {damage}")
    with pytest.raises(StorageError, match="is damaged in the database"):
        traces.load(run.id)


@pytest.mark.parametrize("damage", [*DAMAGE, "'[7]'", f"'{'[' * 9999}'"])
def test_damaged_settings_of_a_run_are_named(db: Database, traces: Traces, damage: str) -> None:
    run = save(traces)
    with db.write() as handle:
        handle.execute(f"UPDATE runs SET settings = {damage}")
    with pytest.raises(StorageError, match="is damaged in the database"):
        traces.load(run.id)


@pytest.fixture
def many(db: Database, traces: Traces) -> list[Trace]:
    """Sixty runs, the newest first: a tenth each of a model, every third plain, each older."""
    talks = [Conversations(db, "ada").create(f"talk {n}").id for n in range(2)]
    found = [
        save(
            traces,
            model=f"model {n % 10}",
            method="plain" if n % 3 == 0 else "hd",
            conversation_id=None if n % 2 else talks[n % 4 // 2],
            kind="compare" if n % 2 else "chat",
        )
        for n in range(60)
    ]
    with db.write() as handle:
        handle.conn.executemany(
            "UPDATE runs SET created = ? WHERE id = ?",
            [(1000.0 - n, run.id) for n, run in enumerate(found)],
        )
    return [replace(run, created=1000.0 - n) for n, run in enumerate(found)]


def test_filters_let_through_what_they_say(db: Database, traces: Traces, many: list[Trace]) -> None:
    filters: list[tuple[Filter, list[Trace]]] = [
        (Filter(), many),
        (Filter(model="model 3"), [run for run in many if run.model == "model 3"]),
        (Filter(method="plain"), many[::3]),
        (Filter(kind="compare"), many[1::2]),
        (Filter(conversation=many[0].conversation_id), many[::4]),
        (Filter(since=951.0), many[:50]),
        (Filter("model 4", "hd", None, "chat", 980.0), [many[4], many[14]]),
        (Filter(model="' OR 1 = 1 --"), []),
        (Filter(conversation="%"), []),
    ]
    for chosen, wanted in filters:
        assert traces.page(chosen) == wanted and traces.count(chosen) == len(wanted), chosen
        paged = [run for start in range(0, 60, 7) for run in traces.page(chosen, start, 7)]
        assert paged == wanted
        bob = Traces(db, "bob")
        assert (bob.page(chosen), bob.count(chosen), bob.trend(chosen)) == ([], 0, [])
        trend = traces.trend(chosen)
        assert sorted(mark.id for mark in trend) == sorted(run.id for run in wanted)
    assert traces.page(start=-5, limit=2) == many[:2] and traces.page(start=60) == []


def test_what_can_be_chosen_is_what_there_is(db: Database, traces: Traces, many: object) -> None:
    Conversations(db, "ada").create("without a run")
    assert traces.names("model") == [f"model {n}" for n in range(10)]
    assert traces.names("method") == ["hd", "plain"]
    assert {title for _, title in traces.conversations(9)} == {"talk 0", "talk 1"}
    assert len(traces.conversations(1)) == 1
    bob = Traces(db, "bob")
    assert (bob.names("model"), bob.names("method"), bob.conversations(9)) == ([], [], [])


def test_many_runs_become_few_marks(
    db: Database, traces: Traces, many: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    traces.note(many[1].id, 3.0, None)
    traces.note(many[2].id, 1.0, None)
    with db.write() as handle:
        handle.execute("UPDATE runs SET model = 'one model'")
    monkeypatch.setattr("storage.steps.POINTS", 10)
    marks = traces.trend()
    assert len(marks) == 20 and sum(mark.runs for mark in marks) == 60
    last = marks[-1]
    assert last.id in {run.id for run in many[:6]} and last.number == 59 - many.index(
        next(run for run in many if run.id == last.id)
    )
    newest = {mark.plain: mark for mark in marks[-2:]}
    assert newest[False].speedup == 2.0 and newest[True].speedup is None
    assert newest[False].id == many[1].id, "a point opens the newest of its runs"
    fast = many[1]
    assert newest[False].speed == pytest.approx(fast.emitted_tokens / fast.decode_seconds)


def test_two_formats_of_a_model_are_distinguished(db: Database, traces: Traces) -> None:
    """A folder and a GGUF file may share a name: "tiny-chat". Runs of before hold no format; it is
    known where the costs of that model were measured."""
    folder, file = "tiny (transformers, float32)", "tiny (llama.cpp, Q8_0)"
    run = replace(RUN, model="tiny")
    ids = [
        traces.save(replace(run, settings={"weights": weights}))
        for weights in ("transformers, float32", "llama.cpp, Q8_0", "llama.cpp, Q8_0")
    ]
    unknown = traces.save(replace(run, fingerprint="unknown"))
    measured = traces.save(replace(run, fingerprint="measured"))
    CostStore(db, "measured", "llama.cpp", "cpu", "F16", 2).save(
        Costs({0: 0.1, 1: 0.2}, 0.0, 0.0, 1.0)
    )

    assert traces.names("model") == ["tiny", "tiny (llama.cpp, F16)", file, folder]
    found = {label: [r.id for r in traces.page(Filter(label))] for label in traces.names("model")}
    assert found[folder] == ids[:1] and found[file] == ids[:0:-1]
    assert found["tiny"] == [unknown] and traces.get(measured).label == "tiny (llama.cpp, F16)"
    assert {traces.count(Filter(label)) for label in (folder, file)} == {1, 2}
    assert traces.load(ids[0]).model == "tiny", "the name is what it was"


def test_a_point_never_mixes_two_models(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(60):
        weights = "transformers, float32" if n % 3 else "llama.cpp, Q8_0"
        traces.save(replace(RUN, model="tiny", settings={"weights": weights}))
    monkeypatch.setattr("storage.steps.POINTS", 10)
    marks = traces.trend()
    assert Counter(mark.label for mark in marks) == {
        "tiny (transformers, float32)": 5, "tiny (llama.cpp, Q8_0)": 5
    }  # fmt: skip
    assert sum(mark.runs for mark in marks) == 60


def test_what_a_run_answered_is_the_conversation_before_it(db: Database, traces: Traces) -> None:
    store = Conversations(db, "ada")
    id = store.create("a <b>title</b>").id
    store.set_system_prompt(id, "Be kind.")
    first, second = (save(traces, conversation_id=id) for _ in range(2))
    for role, text, run in (
        ("user", "one", None), ("assistant", "two", first.id),
        ("user", "three", None), ("assistant", "four", second.id),
    ):  # fmt: skip
        store.append(id, role, text, run)
    before = [("user", "one")]
    assert traces.stored_prompt(first.id) == ("a <b>title</b>", "Be kind.", before)
    found = traces.stored_prompt(second.id)
    assert found and found.messages == [*before, ("assistant", "two"), ("user", "three")]
    assert traces.stored_prompt(save(traces, kind="compare").id) is None
    with pytest.raises(StorageError, match="There is no run"):
        Traces(db, "bob").stored_prompt(second.id)


def test_another_version_answered_what_leads_to_it(db: Database, traces: Traces) -> None:
    store = Conversations(db, "ada")
    id = store.create("a title").id
    first, second = (save(traces, conversation_id=id) for _ in range(2))
    said = store.append(id, "user", "one")
    store.append(id, "assistant", "two", first.id)
    store.append(id, "user", "another one", version_of=said.id)
    answered = store.append(id, "assistant", "three", second.id)
    for run, words in ((first, "one"), (second, "another one")):
        found = traces.stored_prompt(run.id)
        assert found and found.messages == [("user", words)]
    token = store.delete_message(id, answered.id)
    with pytest.raises(StorageError, match="There is no run"):
        traces.stored_prompt(second.id)
    assert traces.count() == 1 and [title for _, title in traces.conversations(9)] == ["a title"]
    store.undo(token)
    assert traces.stored_prompt(second.id) and traces.count() == 2


# what answers came to


def test_the_answers_of_a_conversation_say_what_they_came_to(db: Database, traces: Traces) -> None:
    talk = Conversations(db, "ada").create()
    blank = Step(2, (), {"context": 5}, {"context": 5}, finish="cancelled", verify_seconds=9.0)
    id = traces.save(replace(RUN, steps=(*STEPS, blank), parts=()), talk.id)
    traces.save(RUN)
    seconds = 0.1 + 0.2 + sum(step.seconds for step in STEPS) + 1e-3
    # The second step does not know what it would have taken plainly, so nobody knows the sum.
    worth = traces.worths(talk.id)
    assert worth == {id: Worth(4, 2, pytest.approx(seconds), None, {})}
    plain = traces.save(replace(RUN, steps=STEPS[:1], parts=()), talk.id)
    told = traces.worths(talk.id)[plain].plain_seconds
    assert told == pytest.approx(0.1 + 0.1 + 0.1 + 0.7)
    for form, expected in (("json_schema", True), ("regex", False)):
        bound = replace(RUN, settings={"generation": {"format": {"kind": form, "text": "{}"}}})
        id = traces.save(bound, talk.id)
        assert traces.worths(talk.id)[id].json == expected
    # What reading took again where an answer was gone on with counts for neither.
    several = replace(RUN, steps=STEPS[:1])
    gone_on = traces.save(several, talk.id)
    worth, figures = traces.worths(talk.id)[gone_on], summarise(several)
    assert worth.seconds == pytest.approx(figures.seconds)
    assert figures.plain_seconds is not None and figures.plain_prefill_seconds is not None
    both = figures.plain_seconds + figures.plain_prefill_seconds
    assert worth.plain_seconds == pytest.approx(both)
    assert Traces(db, "bob").worths(talk.id) == {}


def test_a_proof_is_kept_with_its_run_by_its_owner_alone(db: Database, traces: Traces) -> None:
    talk = Conversations(db, "ada").create()
    id = traces.save(RUN, talk.id)
    found = {"same": True, "speedup": 1.8, "odd": "\ud800 <b>"}
    Traces(db, "bob").prove(id, {"same": False})
    assert traces.worths(talk.id)[id].proof == {}
    traces.prove(id, found)
    assert traces.worths(talk.id)[id].proof == {**found, "odd": "\ufffd <b>"}
    for damage in ("'[1]'", "'{'", "x'00'", "7"):
        with db.write() as handle:
            handle.execute(f"UPDATE runs SET proof = {damage}")
        assert traces.worths(talk.id)[id].proof == {}
    with db.write() as handle:
        handle.execute("UPDATE runs SET emitted_tokens = 'many'")
    assert traces.worths(talk.id) == {}
    traces.prove("gone", found)
    traces.prove(id := traces.save(RUN, talk.id), found)
    traces.continue_run(id, STEPS[-1], Part(2, "hd", "toy", "f", {}, Prefill(1, 0)))
    assert traces.worths(talk.id)[id].proof == {}, "an answer that is continued is another one"


def test_a_run_has_one_speaker_or_none(traces: Traces) -> None:
    assert traces.model_fingerprint(traces.save(RUN)) == "", "its parts are of two models"
    assert traces.model_fingerprint(traces.save(replace(RUN, parts=RUN.parts[1:]))) == "f"
    with pytest.raises(StorageError, match="no run"):
        traces.model_fingerprint("gone")


def test_steps_are_read_in_pages(db: Database, traces: Traces) -> None:
    steps = tuple(Step(at, (Token(1, at, "target"),), tree=b"") for at in range(9))
    id = traces.save(replace(RUN, steps=steps))
    assert traces.steps(id) == steps and traces.steps(id, 7) == steps[7:]
    assert traces.step_count(id) == 9
    assert traces.steps(id, 2, 3) == steps[2:5] and traces.steps(id, 9, 3) == ()
    with pytest.raises(StorageError, match="no run"):
        Traces(db, "bob").steps(id)
    with db.write() as handle:
        handle.execute("UPDATE steps SET tree = 'text' WHERE position = 0")
    assert traces.steps(id)[0].tree is None, "as one that was not recorded"


# what charts show of a run

SOURCES = ["context", "model", "statistics", TARGET, "draft:'; DROP TABLE steps; --<img>"]


def random_run(seed: int, count: int) -> Run:
    rng = random.Random(seed)

    def step(index: int) -> Step:
        emitted = rng.randrange(5)
        proposed = {s: rng.randrange(1, 9) for s in rng.sample(SOURCES, rng.randrange(4))}
        return Step(
            index,
            tuple(Token(1, i, rng.choice(SOURCES), text="é") for i in range(emitted)),
            proposed,
            {source: rng.randrange(count + 1) for source, count in proposed.items()},
            tuple((rng.randrange(1, 5), 1) for _ in range(rng.randrange(12))),
            *(rng.random() for _ in range(4)),
        )

    return Run("hd", "toy", "f", steps=tuple(map(step, range(count))))


@pytest.mark.parametrize("count", [0, 1, 7, POINTS - 1, POINTS + 200, 3 * POINTS + 7])
def test_the_sums_of_a_digest_are_those_of_the_metrics(traces: Traces, count: int) -> None:
    run = random_run(count, count)
    found, wanted = digest(run), summarise(run)
    assert (found.method, found.model, found.fingerprint) == ("hd", "toy", "f")
    assert (found.steps, found.tokens) == (wanted.forwards, wanted.tokens)
    assert (dict(found.proposed), dict(found.accepted)) == (wanted.proposed, wanted.accepted)
    assert dict(found.lengths) == wanted.lengths
    assert {s: n / found.tokens for s, n in found.share} == pytest.approx(wanted.share)
    drafted = Counter(sum(step.proposed.values()) for step in run.steps if step.tokens)
    assert dict(found.drafted) == drafted
    depths = [step.by_depth for step in run.steps if step.tokens]
    for depth, (proposed, accepted) in enumerate(found.by_depth):
        at = [each[depth] for each in depths if depth < len(each)]
        assert (proposed, accepted) == (sum(p for p, _ in at), sum(a for _, a in at))
    assert len(found.by_depth) == max(map(len, depths), default=0)
    assert len(found.line) <= POINTS
    if found.line:
        assert found.line[-1].tokens == wanted.tokens
        assert found.line[-1].seconds == pytest.approx(wanted.decode_seconds)
    assert digest(traces.load(traces.save(run))) == found


def test_a_point_of_a_long_run_stands_for_its_neighbours() -> None:
    steps = [
        Step(
            i,
            (Token(1, i, "context" if i % 4 else TARGET),),
            draft_seconds=0.125,
            verify_seconds=0.5,
            sample_seconds=0.25,
            other_seconds=0.0625 * (i % 4),
        )
        for i in range(4 * POINTS)
    ]
    line = digest(Run(steps=tuple(steps))).line
    assert len(line) == POINTS and line[-1].step == 4 * POINTS - 1
    assert line[0] == Point(3, 3.875, 4, "context", 0.125, 0.5, 0.25, 0.09375)
    assert {point.source for point in line} == {"context"}
    tokens = tuple(Token(1, i, source) for i, source in enumerate(["model", "context", TARGET]))
    (point,) = digest(Run(steps=(Step(0, tokens),))).line
    assert point.source == "context", "of equals the first by name"
