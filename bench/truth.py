"""Whether the speedups that the page shows are true.

Answers are requested through the app, as a user does. Some of them are drawn at a temperature at
which hardly a draft is accepted: there the true speedup is 1.
"""

import argparse
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from tqdm import tqdm

from app.service.comparison import Progress, Proof, Side
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
from bench.report import Record, show_rows
from engine.compare import live
from engine.methods import PLAIN
from engine.metrics import summarise

HOT = 2.0
"""A temperature at which hardly a draft is accepted."""
NEAR, ONE = 0.10, 0.05
"""How far a live speedup may be from the measured one; and from 1 if nothing is accepted."""
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
    """

    groups = ("model", "prompts", "temperature", "sampling")

    def add_options(self, add: Add) -> None:
        add("--hopeless", type=int, default=3, help=f"prompts answered at temperature {HOT:g}")
        add("--repeats", type=at_least(1), default=3, help="pairs of a comparison")

    def record(self, options: argparse.Namespace, stack: ExitStack) -> Record:
        questions, generation = texts_of(options), generation_of(options)
        hot = replace(generation, sampling=replace(generation.sampling, temperature=HOT))
        file = Path(stack.enter_context(tempfile.TemporaryDirectory()), "strata.db")
        source, rows = source_of(options.model), []
        session = stack.enter_context(loaded(file, source, runtime_of(options)))
        for number, (category, text) in enumerate(tqdm(questions, desc="Prompts")):
            hopeless = number >= len(questions) - options.hopeless
            preferences = Preferences(hot if hopeless else generation, "hd", fresh_seed=False)
            row = {"owner": f"owner {number}", "category": category, "hopeless": hopeless}
            given = session, row["owner"], text, preferences, options.repeats
            rows.append(row | measured(*given))
        return {"model": Path(source).name, "rows": rows, **differences(rows)}

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
        alone = [row["live"] for row in rows if row["tokens_per_forward"] < 1.005 and row["live"]]
        near = sum(abs(value - 1) <= ONE for value in alone)
        print(
            f"1.00 tokens per forward: {near} of {len(alone)} live speedups within 1.0 +- {ONE:g}"
        )


def measured(
    session: Session, owner: str, text: str, preferences: Preferences, repeats: int
) -> Record:
    conversation = session.chat.say(owner, None, text)
    for _ in session.answering.answer(owner, conversation, preferences):
        pass
    shown = summarise(session.history.last[owner, conversation].run)
    *_, proof = session.proofs.prove(owner, conversation)
    assert isinstance(proof, Proof) and proof.verdict is not None and proof.reruns is not None
    generation = preferences.seeded()
    sides = Side(PLAIN, generation), Side(preferences.chosen(), generation)
    *_, progress = session.proofs.compare_sides(owner, text, "", sides, repeats)
    assert isinstance(progress, Progress)
    return {
        "tokens": shown.tokens,
        "kept": shown.kept,
        "tokens_per_forward": shown.mean_acceptance_length,
        "live": live(shown).whole,
        "proof": proof.reruns.speedup.whole,
        "compare": progress.speedup.whole,
        "identical": proof.verdict.identical,
    }


def differences(rows: list[Record]) -> Record:
    """How far the speedups of both ways are from Compare's."""
    return {
        f"{name}_off": [off(row[name], row["compare"]) for row in rows]
        for name in ("live", "proof")
    }


def off(figure: float | None, compared: float | None) -> float | None:
    """The relative difference of a figure from Compare's, None if there is none. A comparison that
    shows no speedup, because no draft was accepted, counts as 1."""
    return None if figure is None else figure / (compared or 1.0) - 1.0
