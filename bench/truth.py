"""Whether the speedups that the page shows are true.

Answers are requested through the app, as a user does. Some of them are drawn at a temperature at
which hardly a draft is accepted: there the true speedup is 1.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from tqdm import tqdm

from app.service.comparison import Progress, Proof
from app.service.preferences import Preferences
from app.service.session import Session
from bench.harness import (
    Add,
    Measurement,
    at_least,
    generation_of,
    runtime_of,
    source_of,
    texts_of,
)
from bench.page import loaded
from bench.report import Record, cell, show_rows, table
from engine.compare import live
from engine.metrics import summarise

HOT = 2.0
"""A temperature at which hardly a draft is accepted."""
NEAR, ONE = 0.10, 0.05
"""How far a live speedup may be from the measured one; and from 1 if nothing is accepted."""
SPREAD = 0.10
"""How far the proofs of an answer may be apart, as a share of the least."""
COLUMNS = {
    "category": "{category:.15}",
    "tokens": "{tokens}",
    "tok/fwd": "{tokens_per_forward:.2f}",
    "live": "{live:.2f}",
    "proof": "{proof:.2f}",
    "compare": "{compare:.2f}",
    "live off": "{live_off:+.0%}",
    "proof off": "{proof_off:+.0%}",
    "same text": "{same}",
}


class Truth(Measurement):
    """Whether what the page says is true: the live speedup and *Prove it* against *Compare*.

    Every prompt is sent as by a new user: by an owner without past answers, through the app's own
    session and an engine process. The live speedup is what the panel shows when the answer is
    complete. Then the answer is proved, and the same prompt is compared with the same seed.

    With `--proofs` every answer is proved several times, in rounds over all answers, so that the
    proofs of an answer are minutes apart. Their ratios should agree, and none may be above 1 if no
    draft was accepted. `--repeats 0` skips the comparisons.
    """

    groups = ("model", "prompts", "sampling")

    def add_options(self, add: Add) -> None:
        add("--hopeless", type=int, default=3, help=f"prompts answered at temperature {HOT:g}")
        add("--repeats", type=at_least(0), default=3, help="pairs of a comparison; 0 for none")
        add("--proofs", type=at_least(1), default=1, help="proofs of each answer")

    def record(self, options: argparse.Namespace) -> Record:
        questions, generation = texts_of(options), generation_of(options)
        hot = replace(generation, sampling=replace(generation.sampling, temperature=HOT))
        source, rows = source_of(options.model), []
        with (
            tempfile.TemporaryDirectory() as folder,
            loaded(Path(folder, "strata.db"), source, runtime_of(options)) as session,
        ):
            for number, (category, text) in enumerate(tqdm(questions, desc="Prompts")):
                hopeless = number >= len(questions) - options.hopeless
                preferences = Preferences(hot if hopeless else generation, "hd", fresh_seed=False)
                row = {"owner": f"owner {number}", "category": category, "hopeless": hopeless}
                rows.append(row | measured(session, row["owner"], text, preferences, options))
            for _ in range(options.proofs - 1):
                for row in tqdm(rows, desc="Proofs"):
                    row["proofs"].append(proved(session, row["owner"], row["conversation"]))
        return {"model": Path(source).name, "rows": rows, **summary(rows)}

    def show(self, record: Record) -> None:
        rows = [
            row
            | {name: record[name][at] for name in ("live_off", "proof_off")}
            | {"same": "yes" if row["identical"] else "NO"}
            for at, row in enumerate(record["rows"])
        ]
        show_rows(rows, COLUMNS)
        for name in ("live", "proof"):
            found = [abs(value) for value in record[f"{name}_off"] if value is not None]
            if found:
                within = sum(value <= NEAR for value in found)
                print(
                    f"\n{name}: {within} of {len(found)} within {NEAR:.0%} of Compare, "
                    f"median {median(found):.1%}, worst {max(found):.1%}"
                )
        if len(rows[0]["proofs"]) > 1:
            show_proofs(record)
        alone = [row["live"] for row in rows if row["tokens_per_forward"] < 1.005 and row["live"]]
        near = sum(abs(value - 1) <= ONE for value in alone)
        print(
            f"1.00 tokens per forward: {near} of {len(alone)} live speedups within 1.0 +- {ONE:g}"
        )


def measured(
    session: Session, owner: str, text: str, preferences: Preferences, options: argparse.Namespace
) -> Record:
    conversation = session.chat.say(owner, None, text)
    for _ in session.answering.answer(owner, conversation, preferences):
        pass
    shown = summarise(session.history.last[owner, conversation].run)
    proof = proved(session, owner, conversation)
    compared = None
    if options.repeats:
        *_, progress = session.proofs.compare(owner, text, "", preferences, options.repeats)
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
        "compared": bool(options.repeats),
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
    """The relative difference of a figure from Compare's, None if one of them is missing. A
    comparison that shows no speedup, because no draft was accepted, counts as 1."""
    if figure is None or not row["compared"]:
        return None
    return float(figure / (row["compare"] or 1.0) - 1.0)


def show_proofs(record: Record) -> None:
    spreads = record["proof_spread"]
    cells = (
        (
            *(f"{row['category']:.15}", str(row["tokens"]), str(row["kept"]), f"{apart:.1%}"),
            ", ".join(f"{cell('{told:.2f}', proof)} ({proof['pairs']})" for proof in row["proofs"]),
        )
        for row, apart in zip(record["rows"], spreads, strict=True)
    )
    print()
    table(("category", "tokens", "guessed", "spread", "proofs (pairs)"), cells)
    within = sum(value <= SPREAD for value in spreads)
    print(
        f"proofs of an answer: {within} of {len(spreads)} within {SPREAD:.0%} of each other, worst "
        f"{max(spreads):.1%}; {record['proofs_above_one']} above 1 without an accepted draft"
    )
