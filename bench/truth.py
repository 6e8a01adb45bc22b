"""Whether the speedups that the page shows are true.

Answers are requested through the app, as a user does. Some of them are drawn at a temperature at
which hardly a draft is accepted: there the true speedup is 1.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from app.service.comparison import Progress, Proof
from app.service.preferences import Preferences
from app.service.session import Session
from bench.harness import (
    Add,
    Measurement,
    Record,
    cell,
    generation_of,
    model_options,
    prompt_options,
    runtime_of,
    sampling_options,
    show_rows,
    source_of,
    table,
    texts_of,
)
from bench.page import loaded
from engine.compare import live
from engine.errors import SettingError
from engine.metrics import summarise

HOT = 2.0
"""A temperature at which hardly a draft is accepted."""
NEAR, ONE = 0.10, 0.05
"""How far a live speedup may be from the measured one; and from 1 if nothing is accepted."""
SPREAD = 0.10
"""How far the proofs of an answer may be apart, as a share of the least."""
TRUTH_COLUMNS = {
    "category": "{name}",
    "tokens": "{tokens}",
    "tok/fwd": "{tokens_per_forward:.2f}",
    "live": "{live:.2f}",
    "proof": "{proof:.2f}",
    "compare": "{compare:.2f}",
    "live off": "{live_off:s}",
    "proof off": "{proof_off:s}",
    "same text": "{same}",
}
"""The headings of the table, and the format of each cell."""


class Truth(Measurement):
    """Whether what the page says is true: the live speedup and *Prove it* against *Compare*.

    Every prompt is sent as by a new user: by an owner without past answers, in a new
    conversation, through the app's own session and an engine process. The live speedup is what the
    panel shows when the answer is complete. Then the answer is proved, and the same prompt is
    compared with the same seed.

    With `--proofs` every answer is proved several times, in rounds over all answers, so that the
    proofs of an answer are minutes apart. Their ratios should agree, and none may be above 1 if no
    draft was accepted. `--repeats 0` skips the comparisons.
    """

    groups = (model_options, prompt_options, sampling_options)

    def add_options(self, add: Add) -> None:
        add("--hopeless", type=int, default=3, help=f"prompts answered at temperature {HOT:g}")
        add("--repeats", type=int, default=3, help="pairs of a comparison; 0 for none")
        add("--proofs", type=int, default=1, help="proofs of each answer")
        add("--method", default="hd")

    def check(self, options: argparse.Namespace) -> None:
        if options.proofs < 1 or options.repeats < 0:
            raise SettingError("Give at least one proof, and no negative number of repeats.")

    def record(self, options: argparse.Namespace) -> Record:
        questions, generation = texts_of(options), generation_of(options)
        hot = replace(generation.sampling, temperature=HOT)
        source = source_of(options.model)
        rows = []
        with (
            tempfile.TemporaryDirectory() as folder,
            loaded(Path(folder, "strata.db"), source, runtime_of(options)) as session,
        ):
            for number, (category, text) in enumerate(questions):
                hopeless = number >= len(questions) - options.hopeless
                chosen = replace(generation, sampling=hot) if hopeless else generation
                preferences = Preferences(chosen, options.method, fresh_seed=False)
                row = measured(session, owner_of(number), text, preferences, options.repeats)
                rows.append({"category": category, "hopeless": hopeless, **row})
                print(f"{number + 1} of {len(questions)}: {category}", flush=True)
            for _ in range(options.proofs - 1):
                for number, row in enumerate(rows):
                    row["proofs"].append(proved(session, owner_of(number), row["conversation"]))
        return {"model": Path(source).name, "rows": rows, **summary(rows)}

    def show(self, record: Record) -> None:
        print()
        rows = [
            row
            | {"name": row["category"][:15], "same": "yes" if row["identical"] else "NO"}
            | {name: percent(record[name][at]) for name in ("live_off", "proof_off")}
            for at, row in enumerate(record["rows"])
        ]
        show_rows(rows, TRUTH_COLUMNS)
        for name in ("live", "proof"):
            found = [abs(value) for value in record[f"{name}_off"] if value is not None]
            if found:
                within = sum(value <= NEAR for value in found)
                print(
                    f"\n{name}: {within} of {len(found)} within {100 * NEAR:.0f} % of Compare, "
                    f"median {100 * median(found):.1f} %, worst {100 * max(found):.1f} %"
                )
        if len(rows[0]["proofs"]) > 1:
            show_proofs(record)
        alone = [row for row in record["rows"] if row["tokens_per_forward"] < 1.005]
        ones = [row["live"] for row in alone if row["live"] is not None]
        near = sum(abs(value - 1) <= ONE for value in ones)
        print(f"1.00 tokens per forward: {near} of {len(ones)} live speedups within 1.0 +- {ONE:g}")


def owner_of(number: int) -> str:
    return f"owner {number}"


def measured(
    session: Session, owner: str, text: str, preferences: Preferences, repeats: int
) -> Record:
    conversation = session.chat.say(owner, None, text)
    *_, last = session.answering.answer(owner, conversation, preferences)
    shown = summarise(session.history.last[owner, conversation].run)
    proof = proved(session, owner, conversation)
    compared = None
    if repeats:
        *_, progress = session.proofs.compare(owner, text, "", preferences, repeats)
        assert isinstance(progress, Progress)
        compared = progress.speedup.whole
    return {
        "conversation": conversation,
        "tokens": shown.tokens,
        "kept": shown.kept,
        "tokens_per_forward": shown.mean_acceptance_length,
        "live": live(shown).whole,
        "proof": proof["told"],
        "compare": compared,
        "compared": bool(repeats),
        "identical": proof["identical"],
        "proofs": [proof],
    }


def proved(session: Session, owner: str, conversation: str) -> Record:
    """One proof: the speedup it shows, its range, the ratio it is based on, the number of pairs."""
    *_, proof = session.proofs.prove(owner, conversation)
    assert isinstance(proof, Proof) and proof.verdict is not None and proof.reruns is not None
    found = proof.reruns
    return {
        "identical": proof.verdict.identical,
        "told": found.speedup.whole,
        "range": found.range,
        "ratio": found.plain_seconds / found.seconds,
        "pairs": found.pairs,
    }


def summary(rows: list[Record]) -> Record:
    """The differences from Compare; the spread of an answer's proofs is a share of the least."""
    ratios = [[proof["ratio"] for proof in row["proofs"]] for row in rows]
    return {
        "live_off": [off(row["live"], row) for row in rows],
        "proof_off": [off(row["proof"], row) for row in rows],
        "proof_spread": [max(found) / min(found) - 1 for found in ratios],
        "proofs_above_one": sum(
            (proof["told"] or 0.0) > 1 for row in rows if not row["kept"] for proof in row["proofs"]
        ),
    }


def off(figure: float | None, row: Record) -> float | None:
    """The relative difference of a figure from Compare's, None if one of them is missing.

    A comparison that shows no speedup, because no draft was accepted, counts as 1.
    """
    if figure is None or not row["compared"]:
        return None
    return float(figure / (row["compare"] or 1.0) - 1.0)


def percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:+.0f} %"


def show_proofs(record: Record) -> None:
    rows, spreads = record["rows"], record["proof_spread"]
    cells = (
        (
            *(row["category"][:15], str(row["tokens"]), str(row["kept"]), f"{100 * apart:.1f} %"),
            ", ".join(f"{cell('{told:.2f}', proof)} ({proof['pairs']})" for proof in row["proofs"]),
        )
        for row, apart in zip(rows, spreads, strict=True)
    )
    print()
    table(("category", "tokens", "guessed", "spread", "proofs (pairs)"), cells)
    within = sum(value <= SPREAD for value in spreads)
    print(
        f"proofs of an answer: {within} of {len(rows)} within {100 * SPREAD:.0f} % of each other, "
        f"worst {100 * max(spreads):.1f} %; {record['proofs_above_one']} above 1 without an "
        "accepted draft"
    )
