"""Why an answer was fast: in one sentence, and step by step with the origin of each guess.

Everything comes from stored data of the owner, and is plain data. The loaded model turns token ids
into text if it gave the answer; otherwise only the texts in the answer itself are known.

Guessed tokens are accepted drafts. The time saved is the time of plain decoding at the same load
minus the time of the answer, as for the live speedup (engine/compare.py). It is left out for a few
tokens, and below what a clock can measure. For an answer from a server only the counters of the
whole server are known, which include requests of other users at the same time.

The context tier stores no positions. So the place that a guess was copied from is searched when a
user asks for it: the last place before the step with the same tokens. User messages are stored as
text only, so there the same text is searched, whole words first.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from app.service.current import Current
from engine.compare import FEWEST, plain_reading
from engine.drafting.calibration import LONGEST
from engine.drafting.tiers import MODEL_KEY
from engine.engine import ServerCounted
from engine.errors import StorageError, StrataError
from engine.metrics import Metrics
from engine.prompt import CUT
from engine.recorded import Node, nodes, percent
from engine.runs import from_server
from engine.types import CONTEXT, MODEL, STATISTICS, UNKNOWN, Run, Step
from storage.conversations import Conversations, StoredMessage
from storage.database import Database
from storage.drafting import TextStore
from storage.ngrams import ModelNgrams
from storage.steps import RunToken
from storage.traces import Trace, Traces, Worth

SLIGHT = 0.02
"""The share of an answer's time below which a gain or a loss is not noticeable."""


def worth_of(metrics: Metrics) -> Worth:
    plain = metrics.plain_seconds
    if plain is not None:
        plain += plain_reading(metrics)
    known = UNKNOWN not in metrics.share
    return Worth(metrics.tokens, metrics.kept, metrics.seconds, plain, {}, known=known)


def sentence(worth: Worth) -> str:
    """A sentence about an answer; "" if it has no tokens."""
    if worth.tokens <= 0:
        return ""
    if not worth.known:
        return "The server does not report which tokens were guessed."
    count = f"{guessed(worth)} guessed"
    if worth.plain_seconds is None or worth.tokens < FEWEST:
        return f"{count}."
    saved = worth.plain_seconds - worth.seconds
    slight = abs(saved) <= SLIGHT * max(worth.seconds, worth.plain_seconds)
    if saved < 0 and not slight:
        return f"{count}. Looking for guesses cost about {about(-saved)} more than it saved."
    if not worth.guessed:
        return f"{count}."  # Without an accepted guess nothing could be saved: a gain is noise.
    return f"{count}, which saved {'no time to speak of' if slight else f'about {about(saved)}'}."


def guessed(worth: Worth) -> str:
    tokens = "1 token" if worth.tokens == 1 else f"{worth.tokens:,} tokens"
    count = f"{worth.guessed:,}" if worth.guessed else "None"
    return f"{count} of {tokens} {'was' if 1 in (worth.guessed, worth.tokens) else 'were'}"


def about(seconds: float) -> str:
    if seconds < 0.095:
        return f"{max(1, round(1e3 * seconds))} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 119.5 else f"{seconds / 60:.0f} minutes"


def counted_sentence(counted: ServerCounted) -> str:
    if not counted.drafted:
        return "The server as a whole drafted nothing while it answered."
    share = 100 * counted.accepted / counted.drafted
    own = "" if counted.own is None else f" {counted.own:,} were drafted for this answer."
    return (
        f"The server as a whole accepted {counted.accepted:,} of {counted.drafted:,} drafted "
        f"tokens ({share:.0f} %) while it answered.{own}"
    )


def server_sentence(run: Run, counted: ServerCounted | None = None) -> str | None:
    """A sentence about a server's run, from the current counters or the stored ones. None for a run
    on this machine, "" if the server has no counters."""
    server = from_server(run)
    if server is None:
        return None
    found = counted or stored(server.get("counted"))
    return "" if found is None else counted_sentence(found)


def stored(value: Any) -> ServerCounted | None:
    if not isinstance(value, Mapping):
        return None
    drafted, accepted, own = (value.get(name) for name in ("drafted", "accepted", "own"))
    if not isinstance(drafted, int) or not isinstance(accepted, int):
        return None
    return ServerCounted(drafted, accepted, own if isinstance(own, int) else None)


AROUND = 60
"""How many characters of the surrounding text are shown on each side."""


class Spoken(NamedTuple):
    """One message: its text, and its tokens if it is an answer of the same model. `ends[i]` is the
    end of the text of token i."""

    key: str
    text: str
    ids: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


class Guess(NamedTuple):
    """A guess: the matched tokens before it within its own answer, its own token, and the text of
    all of them. `whole` says that the match does not begin before the answer."""

    match: tuple[int, ...]
    token: int
    text: str
    whole: bool = True


class Occurrence(NamedTuple):
    """A place in a message: characters `start` to `end` of the message `key`, its tokens `first` to
    `last` (-1 if they are unknown), and the text before, in, and after the place."""

    key: str
    start: int
    end: int
    first: int
    last: int
    before: str
    copied: str
    after: str


def origin(spoken: Sequence[Spoken], guess: Guess, until: int) -> Occurrence | None:
    *earlier, answer = spoken
    found = by_tokens(answer, guess, until) if guess.whole else None
    for message in reversed(earlier):
        if found is not None:
            break
        if message.ids:
            found = by_tokens(message, guess, len(message.ids))
        elif guess.whole:
            found = by_text(message, guess.text)
    return found


def by_tokens(message: Spoken, guess: Guess, until: int) -> Occurrence | None:
    """The last place of the guess's tokens before token `until`. A guess whose match begins before
    its answer can only stand at the beginning of another answer."""
    ids, size = message.ids, len(guess.match)
    places = range(min(until, len(ids)) - 1, size - 1, -1) if guess.whole else (size,)
    for at in places:
        first = at - size
        if at < min(until, len(ids)) and ids[first : at + 1] == (*guess.match, guess.token):
            start = message.ends[first - 1] if first else 0
            return placed(message, start, message.ends[at], first, at)
    return None


def by_text(message: Spoken, text: str) -> Occurrence | None:
    if not text.strip():
        return None
    content = message.text
    at = last = content.rfind(text)
    while at >= 0:
        end = at + len(text)
        if end == len(content) or not (content[end].isalnum() and text[-1].isalnum()):
            return placed(message, at, end)
        at = content.rfind(text, 0, end - 1)
    if last >= 0:
        return placed(message, last, last + len(text))
    # At the beginning of a message a word has no leading space.
    begins = text.lstrip()
    return placed(message, 0, len(begins)) if content.startswith(begins) else None


def placed(message: Spoken, start: int, end: int, first: int = -1, last: int = -1) -> Occurrence:
    """A place with the text around it, cut at spaces if there are any; "…" marks a cut."""
    text = message.text
    before, after = text[max(0, start - AROUND) : start], text[end : end + AROUND]
    if start > AROUND:
        before = f"… {before.partition(' ')[2] or before}"
    if end + AROUND < len(text):
        after = f"{after.rpartition(' ')[0] or after} …"
    return Occurrence(message.key, start, end, first, last, before, text[start:end], after)


Data = dict[str, Any]
PAGE = 64
"""Steps of a replay that are sent at once."""
LEAD = 4_000
"""Characters of the text before them that are sent."""
ROOT = -1
"""Stands for an unknown token: the last one of a prompt."""
MESSAGES = 64
"""How many messages before an answer are searched for the origin of a guess."""


class TokenTexts:
    def __init__(self, current: Current, fingerprint: str, answer: Iterable[RunToken]) -> None:
        info, loaded = current.info, current.state.is_loaded
        self.engine = current.engine if loaded and info.fingerprint == fingerprint else None
        self.size = info.vocabulary_size
        self.known = {
            token.id: token.text for token in answer if token.text and CUT not in token.text
        }
        self.looked_up: dict[tuple[int, int], str] = {}
        """The texts from the model, by the token before and the token."""

    def look_up(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Get the texts of tokens, each after the token before it, from the model in one call."""
        # A damaged file may name tokens that the model does not have.
        fresh = [pair for pair in {*pairs} - self.looked_up.keys() if max(pair) < self.size]
        if self.engine is None or not fresh:
            return
        try:
            split = [(() if a == ROOT else (a,), b) for a, b in fresh]
            texts = self.engine.texts([t for a, b in split for t in (a, (*a, b), (b,))])
        except StrataError:
            self.engine = None
            return
        for pair, before, both, alone in zip(
            fresh, texts[::3], texts[1::3], texts[2::3], strict=True
        ):
            self.looked_up[pair] = both[len(before) :] if both.startswith(before) else alone

    def text(self, before: int, token: int) -> str | None:
        text = self.looked_up.get((before, token))
        return self.known.get(token) if text is None else text


@dataclass
class Origins:
    """Finds the origins of the guesses for one token: token number `token` of an answer, whose step
    began with token number `first`."""

    database: Database
    owner: str
    current: Current
    trace: Trace
    model_fingerprint: str
    answer: Sequence[RunToken]
    first: int
    token: int

    def origin(self, node: Node, text: str | None) -> Data:
        size = min(node.match_length, self.token)
        whole = size == node.match_length
        before = self.answer[self.token - size : self.token]
        match = tuple(each.id for each in before)
        if node.source == CONTEXT and node.match_length:
            copied = "" if text is None else "".join(each.text for each in before) + text
            found = origin(self.spoken, Guess(match, node.token, copied, whole), self.first)
            return {"place": None if found is None else found._asdict()}
        info = self.current.info
        loaded = info.fingerprint == self.model_fingerprint
        if node.source == MODEL and size >= LONGEST and loaded:
            texts = TextStore(self.database, self.owner, info.tokenizer_fingerprint)
            if kept := texts.place((*match, node.token), self.trace.conversation_id or ""):
                return {"conversation": kept[0], "title": kept[1]}
        if not whole or not size:
            return {}
        if node.source == MODEL:
            past = ModelNgrams(self.database, self.owner, self.model_fingerprint)
            times, of = past.follows(match[-MODEL_KEY:], node.token)
            return {"times": times, "of": of} if times else {}
        if node.source == STATISTICS and loaded:
            table = self.current.statistics
            followers = table.look_up(match) if table else None
            if followers is not None and node.token in followers.counts:
                return {"share": round(followers.counts[node.token] / followers.total, 4)}
        return {}

    @cached_property
    def spoken(self) -> list[Spoken]:
        traces, key, found = Traces(self.database, self.owner), "", list[Spoken]()
        if self.trace.conversation_id is not None:
            store = Conversations(self.database, self.owner)
            messages = store.messages(self.trace.conversation_id, pieces=False)
            runs = [message.run_id for message in messages]
            # If another version of the answer is shown, the messages before this one are unknown.
            at = runs.index(self.trace.id) if self.trace.id in runs else 0
            key = messages[at].id if self.trace.id in runs else ""
            found = [self.read(traces, m) for m in messages[max(0, at - MESSAGES) : at]]
        return [*found, spoken_of(key, self.answer)]

    def read(self, traces: Traces, message: StoredMessage) -> Spoken:
        if message.run_id and self.model_fingerprint:
            with suppress(StorageError):
                if traces.model_fingerprint(message.run_id) == self.model_fingerprint:
                    return spoken_of(message.id, traces.tokens(message.run_id))
        return Spoken(message.id, message.content)


@dataclass(frozen=True, slots=True)
class Why:
    database: Database
    current: Current

    def explain(self, owner: str, run_id: str, step: int, token: int) -> Data:
        """The guesses for a token of an answer, and their origins.

        Raises StorageError for a run that this owner does not have.
        """
        traces = Traces(self.database, owner)
        trace, answer = traces.get(run_id), traces.tokens(run_id)
        steps = traces.steps(run_id, step, 1)
        found: Data = {"run": run_id, "step": step, "token": token, "recorded": False}
        guesses = guesses_of(steps[0]) if steps else None
        if guesses is None or not (0 <= token < len(answer) and answer[token].step == step):
            return found
        first = next(at for at, each in enumerate(answer) if each.step == step)
        path = [0, *(row for row, node in enumerate(guesses, 1) if node.accepted)]
        at = token - first
        here = [node for node in guesses if at < len(path) and node.parent == path[at]]
        model_fingerprint = traces.model_fingerprint(run_id)
        texts = TokenTexts(self.current, model_fingerprint, answer)
        before = answer[token - 1].id if token else ROOT
        texts.look_up((before, node.token) for node in here)
        origins = Origins(
            self.database, owner, self.current, trace, model_fingerprint, answer, first, token
        )
        for node in here:
            text = answer[token].text if node.accepted else texts.text(before, node.token)
            guess = {
                "text": text,
                "id": node.token,
                "source": node.source,
                "match": node.match_length,
                "percent": node.percent,
                **origins.origin(node, text),
            }
            found.setdefault("accepted" if node.accepted else "rejected", []).append(guess)
        return found | {"recorded": True, "unseen": sum(not node.reached for node in guesses)}

    def page(self, owner: str, run_id: str, first: int) -> Data:
        """Some steps of a run from number `first` on, for the replay.

        Raises StorageError for a run that this owner does not have.
        """
        traces = Traces(self.database, owner)
        trace, answer = traces.get(run_id), traces.tokens(run_id)
        first = max(0, first)
        steps = traces.steps(run_id, first, PAGE)
        texts = TokenTexts(self.current, traces.model_fingerprint(run_id), answer)
        before: dict[int, int] = {}
        last = ROOT
        for each in answer:
            before.setdefault(each.step, last)
            last = each.id
        trees = {step.index: guesses_of(step) for step in steps}
        texts.look_up(
            (parent_token(tree, node, before.get(index, ROOT)), node.token)
            for index, tree in trees.items()
            for node in tree or ()
        )
        lead = "".join(each.text for each in answer if each.step < first)
        return {
            "run": run_id,
            "model": trace.model,
            "method": trace.method,
            "total": max((each.step for each in answer), default=-1) + 1,
            "first": first,
            "lead": lead[-LEAD:],
            "cut": len(lead) > LEAD,
            "steps": [
                step_of(texts, step, trees[step.index], before.get(step.index, ROOT))
                for step in steps
                if step.tokens
            ],
        }


def guesses_of(step: Step) -> tuple[Node, ...] | None:
    try:
        return nodes(step)
    except (IndexError, ValueError):
        return None


def spoken_of(key: str, tokens: Sequence[RunToken]) -> Spoken:
    ends, text = [], ""
    for each in tokens:
        text += each.text
        ends.append(len(text))
    return Spoken(key, text, tuple(each.id for each in tokens), tuple(ends))


def parent_token(tree: Sequence[Node] | None, node: Node, root: int) -> int:
    return tree[node.parent - 1].token if tree and node.parent else root


def step_of(texts: TokenTexts, step: Step, tree: Sequence[Node] | None, root: int) -> Data:
    """A step of a replay: its guesses, its emitted tokens, and its times in microseconds.

    A guess is [text, parent row, source, match length, percent, accepted, reached]. If its text is
    unknown, the id of the token stands instead.
    """
    guesses: list[list[object]] = []
    for node in tree or ():
        text = texts.text(parent_token(tree, node, root), node.token)
        known: object = node.token if text is None else text
        accepted, reached = int(node.accepted), int(node.reached)
        guesses.append(
            [known, node.parent, node.source, node.match_length, node.percent, accepted, reached]
        )
    times = step.draft_seconds, step.verify_seconds, step.sample_seconds, step.other_seconds
    return {
        "step": step.index,
        "tokens": [[t.text, t.source, percent(t.probability)] for t in step.tokens],
        "guesses": None if tree is None else guesses,
        "times": [round(1e6 * seconds) for seconds in times],
        "plain": None if step.plain_seconds is None else round(1e6 * step.plain_seconds),
    }
