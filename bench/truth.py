"""Whether what the page says is true: the live speedup and *Prove it* against *Compare*.

Every prompt is asked as a new user would: by an owner of whom nothing is known, in a new
conversation, through the app's own session and an engine process. The live speedup is the one that
the panel shows when the answer is over. Then the answer is proved, and the same prompt is compared
with the same seed. Some prompts are answered at a temperature at which hardly a draft is accepted:
there the truth is 1.
"""

import argparse
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from app.service.comparison import Progress, Proof
from app.service.preferences import Preferences
from app.service.session import Session
from assets import ASSETS
from bench.options import (
    SHORT,
    Record,
    add_model_arguments,
    add_prompt_arguments,
    add_sampling_arguments,
    add_save_argument,
    check_save,
    generation_of,
    print_record,
    runtime_of,
)
from bench.prompts import questions_of
from engine.compare import live
from engine.local import Local
from engine.metrics import summarise
from engine.remote import Remote
from engine.settings import Generation
from storage.database import Database
from storage.statistics import open_table

HOPELESS = 2.0
"""A temperature at which drafts are hardly ever right."""
NEAR, ONE = 0.10, 0.05
"""How far a live speedup may be from the measured one; and from 1 where nothing is accepted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench truth`."""
    add_model_arguments(parser)
    add_prompt_arguments(parser)
    add_sampling_arguments(parser)
    add = parser.add_argument
    add("--hopeless", type=int, default=3, help=f"prompts answered at temperature {HOPELESS:g}")
    add("--repeats", type=int, default=3, help="pairs of a comparison")
    add("--method", default="hd")
    add_save_argument(parser)


def run(options: argparse.Namespace) -> None:
    """Measure, print, save."""
    check_save(options.save)
    questions, generation = questions_of(options), generation_of(options)
    source = str(SHORT.get(options.model, options.model))
    engine = Remote(partial(Local, partial(open_table, (ASSETS / "statistics",))))
    rows = []
    try:
        with tempfile.TemporaryDirectory() as folder, Database(Path(folder, "strata.db")) as db:
            session = Session(engine, db)
            for _ in session.models.start(source, runtime_of(options)):
                pass
            for number, (category, text) in enumerate(questions):
                hopeless = number >= len(questions) - options.hopeless
                asked = heated(generation) if hopeless else generation
                preferences = Preferences(asked, options.method, fresh_seed=False)
                row = measured(session, f"owner {number}", text, preferences, options.repeats)
                rows.append({"category": category, "hopeless": hopeless, **row})
                show_row(rows[-1], number)
    finally:
        engine.close()
    record = {"model": Path(source).name, "rows": rows, **summary(rows)}
    show(record)
    print_record(record, options.save)


def heated(generation: Generation) -> Generation:
    """The same at a temperature at which drafts are hardly ever right."""
    return replace(generation, sampling=replace(generation.sampling, temperature=HOPELESS))


def measured(
    session: Session, owner: str, text: str, preferences: Preferences, repeats: int
) -> Record:
    """One prompt: what the panel shows, what a proof says, what a comparison says."""
    conversation = session.chat.say(owner, None, text)
    *_, last = session.answering.answer(owner, conversation, preferences)
    shown = summarise(session.history.last[owner, conversation].run)
    *_, proof = session.proofs.prove(owner, conversation)
    *_, progress = session.proofs.compare(owner, text, "", preferences, repeats)
    assert isinstance(proof, Proof) and isinstance(progress, Progress)
    identical = proof.verdict is not None and proof.verdict.identical
    return {
        "tokens": shown.tokens,
        "tokens_per_forward": shown.mean_acceptance_length,
        "live": live(shown).whole,
        "proof": proof.speedup.whole,
        "compare": progress.speedup.whole,
        "identical": identical,
    }


def summary(rows: list[Record]) -> Record:
    """How far the live figures and the proofs are from the comparisons."""
    return {
        "live_off": [off(row["live"], row["compare"]) for row in rows],
        "proof_off": [off(row["proof"], row["compare"]) for row in rows],
    }


def off(said: float | None, true: float | None) -> float | None:
    """How far a figure is from the measured one, as a share of it. A comparison in which nothing
    was accepted and that is not told counts as 1."""
    return None if said is None else said / (true or 1.0) - 1.0


def show_row(row: Record, number: int) -> None:
    """Print one prompt."""
    if number == 0:
        print(
            f"{'category':16}{'tokens':>7}{'tok/fwd':>9}{'live':>7}{'proof':>7}{'compare':>9}"
            f"{'live off':>10}{'proof off':>11}  same text"
        )
    away = [off(row[name], row["compare"]) for name in ("live", "proof")]
    print(
        f"{row['category'][:15]:16}{row['tokens']:7}{row['tokens_per_forward']:9.2f}"
        f"{told(row['live']):>7}{told(row['proof']):>7}{told(row['compare']):>9}"
        f"{share(away[0]):>10}{share(away[1]):>11}  {'yes' if row['identical'] else 'NO'}",
        flush=True,
    )


def told(ratio: float | None) -> str:
    """A speedup, and a dash where there is none to tell."""
    return "-" if ratio is None else f"{ratio:.2f}"


def share(value: float | None) -> str:
    """A difference in per cent."""
    return "-" if value is None else f"{100 * value:+.0f} %"


def show(record: Record) -> None:
    """Print the outcome."""
    for name, bar in (("live", NEAR), ("proof", NEAR)):
        found = [abs(value) for value in record[f"{name}_off"] if value is not None]
        if found:
            within = sum(value <= bar for value in found)
            print(
                f"\n{name}: {within} of {len(found)} within {100 * bar:.0f} % of Compare, median "
                f"{100 * median(found):.1f} %, worst {100 * max(found):.1f} %"
            )
    alone = [row for row in record["rows"] if row["tokens_per_forward"] < 1.005]
    ones = [row["live"] for row in alone if row["live"] is not None]
    near = sum(abs(value - 1) <= ONE for value in ones)
    print(f"1.00 tokens per forward: {near} of {len(ones)} live speedups within 1.0 +- {ONE:g}\n")
