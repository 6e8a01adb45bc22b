"""Why an answer was fast: what was guessed at each step of it, and where that came from.

Everything is told from what is stored, for the owner alone. Token numbers are told as text by the
loaded model, where it is the one that gave the answer; else by what the answer itself says of them.
What is told is data, and text of a model or a user is never anything but text in it.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from app.service.current import Current
from app.service.origins import Spoken, Wanted, origin
from engine.errors import StorageError, StrataError
from engine.recorded import Node, nodes, percent
from engine.text import CUT
from engine.types import CONTEXT, MODEL, STATISTICS, Step
from storage.conversations import Conversations, StoredMessage
from storage.database import Database
from storage.ngrams import ModelNgrams
from storage.steps import Said
from storage.traces import Trace, Traces

Data = dict[str, Any]
"""What JSON can hold."""
PAGE = 64
"""Steps of a replay that are told at once."""
LEAD = 4_000
"""Characters before them."""
ROOT = -1
"""In the place of a token that is not known: the last one of a prompt."""
MESSAGES = 64
"""Messages before an answer among which a guess's origin is looked for."""


class Words:
    """The texts of tokens, as far as they are known."""

    def __init__(self, current: Current, fingerprint: str, said: Iterable[Said]) -> None:
        info, there = current.info, current.state.there
        self.engine = current.engine if there and info.fingerprint == fingerprint else None
        self.size = info.vocabulary_size
        self.known = {
            token.id: token.text for token in said if token.text and CUT not in token.text
        }
        self.asked: dict[tuple[int, int], str] = {}

    def ask(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Have the model say what tokens say behind the token before them, all in one question."""
        # A damaged file may name tokens that the model does not have.
        fresh = [pair for pair in {*pairs} - self.asked.keys() if max(pair) < self.size]
        if self.engine is None or not fresh:
            return
        try:
            asked = [(() if a == ROOT else (a,), b) for a, b in fresh]
            texts = self.engine.texts([t for a, b in asked for t in (a, (*a, b), (b,))])
        except StrataError:
            self.engine = None
            return
        for pair, before, both, alone in zip(
            fresh, texts[::3], texts[1::3], texts[2::3], strict=True
        ):
            self.asked[pair] = both[len(before) :] if both.startswith(before) else alone

    def text(self, before: int, token: int) -> str | None:
        """What a token says behind another one; None where nobody knows."""
        said = self.asked.get((before, token))
        return self.known.get(token) if said is None else said


class Looked:
    """Where the guesses in the place of one token came from: the token number `token` of an answer,
    whose step began with number `first`."""

    def __init__(
        self,
        database: Database,
        owner: str,
        current: Current,
        trace: Trace,
        speaker: str,
        said: Sequence[Said],
        first: int,
        token: int,
    ) -> None:
        self.database, self.owner, self.current = database, owner, current
        self.trace, self.speaker, self.said = trace, speaker, said
        self.first, self.token = first, token
        self.ids = [each.id for each in said]

    def origin(self, node: Node, text: str | None) -> Data:
        """A place in the conversation, or how often it was seen; nothing where neither is known."""
        size = min(node.match_length, self.token)
        whole = size == node.match_length
        match = tuple(self.ids[self.token - size : self.token])
        if node.source == CONTEXT and node.match_length:
            said = self.said[self.token - size : self.token]
            copied = "" if text is None else "".join(each.text for each in said) + text
            found = origin(self.spoken, Wanted(match, node.token, copied, whole), self.first)
            return {"place": None if found is None else found._asdict()}
        if not whole or not size:
            return {}
        if node.source == MODEL:
            past = ModelNgrams(self.database, self.owner, self.speaker)
            times, of = past.follows(match, node.token)
            return {"times": times, "of": of} if times else {}
        if node.source == STATISTICS and self.current.info.fingerprint == self.speaker:
            table = self.current.statistics
            followers = table.look_up(match) if table else None
            if followers is not None and node.token in followers.counts:
                return {"share": round(followers.counts[node.token] / followers.total, 4)}
        return {}

    @cached_property
    def spoken(self) -> list[Spoken]:
        """The conversation up to the answer, which comes last."""
        traces, key, found = Traces(self.database, self.owner), "", list[Spoken]()
        if self.trace.conversation_id is not None:
            store = Conversations(self.database, self.owner)
            messages = store.messages(self.trace.conversation_id, pieces=False)
            runs = [message.run_id for message in messages]
            # Where another version of the answer is shown, nothing shown is known to be before it.
            at = runs.index(self.trace.id) if self.trace.id in runs else 0
            key = messages[at].id if self.trace.id in runs else ""
            found = [self.read(traces, m) for m in messages[max(0, at - MESSAGES) : at]]
        return [*found, spoken_of(key, self.said)]

    def read(self, traces: Traces, message: StoredMessage) -> Spoken:
        """A message: by its tokens, where the same model said it and they are whole."""
        if message.run_id:
            with suppress(StorageError):
                if self.speaker and traces.speaker(message.run_id) == self.speaker:
                    return spoken_of(message.id, traces.said(message.run_id))
        return Spoken(message.id, message.content)


@dataclass(frozen=True, slots=True)
class Why:
    """See the module's docstring."""

    database: Database
    current: Current

    def explain(self, owner: str, run_id: str, step: int, token: int) -> Data:
        """What was guessed in the place of a token of an answer, and where that came from.

        Raises StorageError for a run that this owner does not have.
        """
        traces = Traces(self.database, owner)
        trace, said = traces.get(run_id), traces.said(run_id)
        found = traces.steps(run_id, step, 1)
        told: Data = {"run": run_id, "step": step, "token": token, "recorded": False}
        guesses = guesses_of(found[0]) if found else None
        if guesses is None or not (0 <= token < len(said) and said[token].step == step):
            return told
        first = next(at for at, each in enumerate(said) if each.step == step)
        path = [0, *(row for row, node in enumerate(guesses, 1) if node.accepted)]
        at = token - first
        here = [node for node in guesses if at < len(path) and node.parent == path[at]]
        speaker = traces.speaker(run_id)
        words = Words(self.current, speaker, said)
        before = said[token - 1].id if token else ROOT
        words.ask((before, node.token) for node in here)
        looked = Looked(self.database, owner, self.current, trace, speaker, said, first, token)
        for node in here:
            text = said[token].text if node.accepted else words.text(before, node.token)
            guess = guess_of(node, text) | looked.origin(node, text)
            told.setdefault("accepted" if node.accepted else "rejected", []).append(guess)
        return told | {"recorded": True, "unseen": sum(not node.reached for node in guesses)}

    def page(self, owner: str, run_id: str, first: int) -> Data:
        """Some steps of a run from number `first` on, for the replay.

        Raises StorageError for a run that this owner does not have.
        """
        traces = Traces(self.database, owner)
        trace, said = traces.get(run_id), traces.said(run_id)
        first = max(0, first)
        steps = traces.steps(run_id, first, PAGE)
        words = Words(self.current, traces.speaker(run_id), said)
        before: dict[int, int] = {}
        last = ROOT
        for each in said:
            before.setdefault(each.step, last)
            last = each.id
        trees = {step.index: guesses_of(step) for step in steps}
        words.ask(
            (parent_token(tree, node, before.get(index, ROOT)), node.token)
            for index, tree in trees.items()
            for node in tree or ()
        )
        lead = "".join(each.text for each in said if each.step < first)
        return {
            "run": run_id,
            "model": trace.model,
            "method": trace.method,
            "total": max((each.step for each in said), default=-1) + 1,
            "first": first,
            "lead": lead[-LEAD:],
            "cut": len(lead) > LEAD,
            "steps": [
                step_of(words, step, trees[step.index], before.get(step.index, ROOT))
                for step in steps
                if step.tokens
            ],
        }


def guesses_of(step: Step) -> tuple[Node, ...] | None:
    """The guesses of a step; None where they were not recorded, or are damaged."""
    try:
        return nodes(step)
    except (IndexError, ValueError):
        return None


def spoken_of(key: str, said: Sequence[Said]) -> Spoken:
    """An answer by its tokens."""
    ends, text = [], ""
    for each in said:
        text += each.text
        ends.append(len(text))
    return Spoken(key, text, tuple(each.id for each in said), tuple(ends))


def parent_token(tree: Sequence[Node] | None, node: Node, root: int) -> int:
    """The token before a guess."""
    return tree[node.parent - 1].token if tree and node.parent else root


def guess_of(node: Node, text: str | None) -> Data:
    """A guess as data."""
    return {
        "text": text,
        "id": node.token,
        "source": node.source,
        "match": node.match_length,
        "percent": node.percent,
    }


def step_of(words: Words, step: Step, tree: Sequence[Node] | None, root: int) -> Data:
    """A step of a replay: what was guessed, what was kept, and how long it took, in microseconds.

    A guess is [text, row before it, source, match length, percent, accepted, reached]; its text is
    the number of the token where nobody knows it.
    """
    guesses: list[list[object]] = []
    for node in tree or ():
        text = words.text(parent_token(tree, node, root), node.token)
        known: object = node.token if text is None else text
        accepted, reached = int(node.accepted), int(node.reached)
        guesses.append(
            [known, node.parent, node.source, node.match_length, node.percent, accepted, reached]
        )
    times = step.draft_seconds, step.verify_seconds, step.sample_seconds, step.other_seconds
    return {
        "step": step.index,
        "said": [[t.text, t.source, percent(t.probability)] for t in step.tokens],
        "guesses": None if tree is None else guesses,
        "times": [round(1e6 * seconds) for seconds in times],
        "plain": None if step.plain_seconds is None else round(1e6 * step.plain_seconds),
    }
