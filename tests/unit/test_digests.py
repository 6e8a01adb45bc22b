"""What charts show of a run: what SQLite sums up is what is summed up in memory, bounded."""

import random
from dataclasses import replace

import pytest

from engine.errors import StorageError
from engine.metrics import summarise
from engine.types import TARGET, Run, Step, Token
from storage.database import Database
from storage.digests import POINTS, Digest, digest
from storage.traces import Traces

SOURCES = ["context", "model", "statistics", TARGET, "draft:'; DROP TABLE steps; --<img>"]


def random_run(seed: int, count: int) -> Run:
    rng = random.Random(seed)

    def step(index: int) -> Step:
        emitted = rng.randrange(5)
        proposed = {s: rng.randrange(1, 9) for s in rng.sample(SOURCES, rng.randrange(4))}
        return Step(
            index,
            tuple(Token(1, i, rng.choice(SOURCES), text="é\ud800\x00") for i in range(emitted)),
            proposed,
            {source: rng.randrange(count + 1) for source, count in proposed.items()},
            tuple((rng.randrange(1, 5), 1) for _ in range(rng.randrange(12))),
            *(rng.random() for _ in range(4)),
        )

    return Run("hd", "toy", "f", steps=tuple(map(step, range(count))))


def rounded(found: Digest) -> Digest:
    """Sums of floats depend on their order."""
    line = tuple(
        replace(
            point,
            **{
                name: round(getattr(point, name), 9)
                for name in ("seconds", "draft", "verify", "sample", "other")
            },
        )
        for point in found.line
    )
    return replace(found, line=line)


@pytest.mark.parametrize("count", [0, 1, 7, POINTS - 1, POINTS + 200, 3 * POINTS + 7])
def test_stored_runs_are_summed_up_as_those_in_memory(db: Database, count: int) -> None:
    run, store = random_run(count, count), Traces(db, "ada")
    store.save(random_run(99, 30))
    found = store.digest(store.save(run))
    assert rounded(found) == rounded(digest(run))
    assert len(found.line) <= POINTS


def test_the_sums_are_those_of_the_metrics() -> None:
    run = random_run(3, 900)
    found, wanted = digest(run), summarise(run)
    assert (found.steps, found.tokens) == (wanted.forwards, wanted.tokens)
    assert found.line[-1].tokens == wanted.tokens
    assert found.line[-1].seconds == pytest.approx(wanted.decode_seconds)
    assert (dict(found.proposed), dict(found.accepted)) == (wanted.proposed, wanted.accepted)
    assert dict(found.lengths) == wanted.lengths
    assert {s: n / found.tokens for s, n in found.share} == pytest.approx(wanted.share)


def test_a_point_of_a_long_run_stands_for_its_neighbours() -> None:
    steps = [
        Step(i, (Token(1, i, "context" if i % 4 else TARGET),), verify_seconds=0.5)
        for i in range(4 * POINTS)
    ]
    line = digest(Run(steps=tuple(steps))).line
    assert len(line) == POINTS and line[0].step == 3 and line[-1].step == 4 * POINTS - 1
    assert (line[0].seconds, line[0].tokens, line[0].verify) == (2.0, 4, 0.5)
    assert {point.source for point in line} == {"context"}


def test_of_equal_sources_the_first_by_name_is_told() -> None:
    tokens = tuple(Token(1, i, source) for i, source in enumerate(["model", "context", TARGET]))
    assert digest(Run(steps=(Step(0, tokens),))).line[0].source == "context"


@pytest.mark.parametrize("column", ["tokens", "proposed", "accepted", "by_depth"])
@pytest.mark.parametrize("damage", ["'['", "x'00ff'", f"'{'[' * 9999}'"])
def test_damaged_steps_are_told(db: Database, column: str, damage: str) -> None:
    store = Traces(db, "ada")
    run = store.save(random_run(1, 20))
    with db.write() as handle:
        handle.execute(f"UPDATE steps SET {column} = {damage}")
    with pytest.raises(StorageError, match="is damaged in the database"):
        store.digest(run)


def test_another_owners_run_does_not_exist(db: Database) -> None:
    run = Traces(db, "ada").save(random_run(1, 20))
    for act in (Traces(db, "bob").digest, Traces(db, "bob").steps, Traces(db, "bob").step_count):
        with pytest.raises(StorageError, match="There is no run"):
            act(run)
