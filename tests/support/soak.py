"""Many owners chat in turn, in a process of its own: prints the memory it takes, in bytes.

    python -m tests.support.soak CONVERSATIONS OWNERS LIMIT

One line per tenth of the conversations: the resident memory, and what drafting says it takes.
"""

import gc
import random
import sys
import tempfile
from pathlib import Path

import psutil

from app.service.preferences import Preferences
from app.service.session import Session
from engine.local import Local
from engine.settings import Generation, Sampling
from storage.database import Database
from storage.drafting import DraftingStore
from tests.support.toy import ToyBackend, toy_logits

METHODS = ("hd", "hd", "hd-published", "plain")


def main(conversations: int, owners: int, limit: int) -> None:
    """Every conversation has words of its own, so that there is much to remember."""
    draw, process = random.Random(1), psutil.Process()
    with tempfile.TemporaryDirectory() as folder, Database(Path(folder) / "soak.db") as database:
        # The toy remembers its logits, which is not what is measured here.
        backend = ToyBackend(4096, logits=toy_logits.__wrapped__)
        engine = Local(backend=backend, store=DraftingStore(database))
        session, memory = Session(engine, database), engine.loaded.memory
        memory.limit = limit
        engine.loaded.sequences.limit = limit
        for number in range(conversations):
            owner = f"owner {number % owners}"
            words = (f"{draw.getrandbits(40):x}" for _ in range(200))
            conversation = session.chat.say(owner, None, " ".join(words))
            generation = Generation(Sampling(temperature=1.5, seed=number), max_tokens=500)
            chosen = Preferences(generation, METHODS[number % len(METHODS)], fresh_seed=False)
            for _ in session.answering.answer(owner, conversation, chosen):
                pass
            if (number + 1) % (conversations // 10) == 0:
                gc.collect()
                print(process.memory_info().rss, memory.bytes, flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
