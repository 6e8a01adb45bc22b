"""All of a database that a user can see, as a version showed it of tests/fixtures/0010.db.

That file has content of every kind, and 0010.json what its version showed of it: later versions
have to open the one and show the other.
"""

import json
from dataclasses import asdict
from typing import Any

from storage.conversations import Conversations
from storage.database import Database
from storage.drafting import CalibrationStore, ContextStore
from storage.machine import CostStore, ProfileKey, ProfileStore, SourceStore
from storage.ngrams import ModelNgrams
from storage.traces import Traces

OWNERS = ("local", "guest:browser-1")
SAMPLING = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.0}
KEY = ProfileKey("toy", ("small", "mid"), SAMPLING, "cpu/float32/2")
COSTS = ("toy", "toy", "cpu", "float32", 2)


def shown(db: Database) -> dict[str, Any]:
    profiles, sources = ProfileStore(db), SourceStore(db)
    found: dict[str, Any] = {
        "costs": CostStore(db, *COSTS).load(),
        "profile": profiles.load(KEY),
        "stack": profiles.chosen("toy"),
        "models": sources.models(),
        "folders": sources.folders(),
        **{owner: shown_to(db, owner) for owner in OWNERS},
    }
    return dict(json.loads(json.dumps(found)))


def shown_to(db: Database, owner: str) -> dict[str, Any]:
    conversations, traces, log = (
        Conversations(db, owner),
        Traces(db, owner),
        ContextStore(db, owner),
    )
    history = traces.history()
    return {
        "room": conversations.room(),
        "conversations": [asdict(each) for each in conversations.list()],
        "searches": {
            words: [each.id for each in conversations.list(words)]
            for words in ("hello", "alert(1)", "Regen", "nothing like it")
        },
        "messages": {
            each.id: [
                [m.id, m.position, m.role, m.content, m.run_id, m.created, m.pieces]
                for m in conversations.messages(each.id)
            ]
            for each in conversations.list()
        },
        "exports": {each.id: conversations.export(each.id) for each in conversations.list()},
        "logs": {each.id: log.load(each.id, "bytes") for each in conversations.list()},
        "history": [asdict(trace) for trace in history],
        "runs": {trace.id: shown_run(traces, trace.id) for trace in history},
        "ngrams": ModelNgrams(db, owner, "toy").top(99),
        "calibration": CalibrationStore(db, owner, "toy").load(),
    }


def shown_run(traces: Traces, id: str) -> Any:
    try:
        run = traces.load(id)
    except Exception as error:
        return str(error)
    steps = [[asdict(step)[name] for name in STEP] for step in run.steps]
    parts = [part and asdict(part) for part in (run.prefill, run.learned)]
    more = [asdict(part) for part in run.parts]
    return [run.method, run.model, run.fingerprint, run.settings, *parts, *more, steps]


STEP = (
    "index",
    "tokens",
    "proposed",
    "accepted",
    "by_depth",
    "draft_seconds",
    "verify_seconds",
    "sample_seconds",
    "other_seconds",
    "look_ups",
    "levels",
    "finish",
    "plain_seconds",
)
