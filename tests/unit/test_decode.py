"""The decode loop's events: positions, counters, sources, what ends an answer, who is told."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from engine.backends.base import Backend, Filled
from engine.decode import decode
from engine.drafting.base import Drafter
from engine.drafting.budget import Budget
from engine.drafting.controller import DraftController
from engine.drafting.costs import CostCurve
from engine.errors import PromptError
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree, graft
from engine.types import RULES, Event, Learned, Prefill, Rule, Step, Work
from tests.support.runs import summed
from tests.support.toy import END, ToyBackend

PROMPT = list(b"once upon a time")
LONG = Generation(Sampling(temperature=0.0), max_tokens=60)


class Scripted:
    """A drafter that drafts the paths a function says, and writes down what it is told."""

    def __init__(
        self, say: Callable[[Sequence[int]], Sequence[Sequence[int]]], name: str = "context"
    ) -> None:
        self.say, self.name = say, name
        self.calls: list[tuple[str, tuple[int, ...], int]] = []
        self.asked: list[tuple[int, int, int]] = []

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        self.asked.append((len(tree), budget.nodes, budget.depth))
        for path in self.say(tokens):
            graft(tree, path[: budget.depth], self.name, 3, budget.nodes)
        return {self.name: Work(0.25)}

    def observe(self, tokens: Sequence[int], new: int) -> None:
        self.calls.append(("observe", tuple(tokens), new))

    def finish(self, tokens: Sequence[int], new: int) -> None:
        self.calls.append(("finish", tuple(tokens), new))


def answer_of(
    generation: Generation = LONG, prompt: Sequence[int] = PROMPT, backend: Backend | None = None
) -> list[int]:
    backend = backend or ToyBackend()
    events = decode(backend, prompt, [], generation, Drafting())
    return [token.id for step in events if isinstance(step, Step) for token in step.tokens]


def oracle(
    ahead: int, generation: Generation = LONG, prompt: Sequence[int] = PROMPT, name: str = "context"
) -> Scripted:
    """Proposes what the target will say: `ahead` tokens of it."""
    truth = [*prompt, *answer_of(generation, prompt)]
    return Scripted(lambda tokens: [truth[len(tokens) : len(tokens) + ahead]], name)


def run(
    *drafters: Drafter,
    generation: Generation = LONG,
    drafting: Drafting | None = None,
    backend: ToyBackend | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    costs: CostCurve | None = None,
) -> tuple[Prefill, list[Step]]:
    backend, drafting = backend or ToyBackend(), drafting or Drafting()
    first, *events = decode(backend, PROMPT, drafters, generation, drafting, cancelled, costs)
    steps = [event for event in events if isinstance(event, Step)]
    answered = any(step.tokens for step in steps)
    assert isinstance(first, Prefill) and events[len(steps) :] == [Learned()] * answered
    return first, steps


def test_a_plain_run_is_one_token_per_step(toy: ToyBackend) -> None:
    prefill, steps = run(backend=toy)
    assert (prefill.tokens, prefill.reused) == (len(PROMPT), 0)
    assert [step.index for step in steps] == list(range(len(steps)))
    assert all(len(step.tokens) == 1 and step.tokens[0].source == "target" for step in steps)
    assert all(not step.proposed and not step.accepted and not step.by_depth for step in steps)
    assert [step.finish for step in steps[:-1]] == [None] * (len(steps) - 1)
    assert steps[-1].finish is not None and toy.forwards == len(steps)
    assert all(step.seconds > 0 for step in steps)


def test_a_drafter_that_knows_the_answer_is_always_right() -> None:
    drafter = oracle(5)
    _, steps = run(drafter)
    assert all(step.accepted == step.proposed for step in steps)
    assert [len(step.tokens) for step in steps[:-1]] == [6] * (len(steps) - 1)
    tokens = [token for step in steps for token in step.tokens]
    assert [token.id for token in tokens] == answer_of()
    positions = [token.position for token in tokens]
    assert positions == list(range(len(PROMPT), len(PROMPT) + len(positions)))
    for step in steps[:-1]:
        assert [token.source for token in step.tokens] == ["context"] * 5 + ["target"]
        assert [token.match_length for token in step.tokens] == [3] * 5 + [0]
        assert step.by_depth == ((1, 1),) * 5
    assert summed(None, steps).acceptance_rate == 1.0


def test_counters_count_every_node_of_every_source() -> None:
    right, wrong = oracle(2, name="model"), Scripted(lambda tokens: [(7, 8, 9)], "statistics")
    _, steps = run(right, wrong, drafting=Drafting(nodes=5))
    for step in steps[:-2]:
        assert step.proposed == {"model": 2, "statistics": 3}
        assert step.accepted == {"model": 2}
        assert step.by_depth == ((2, 1), (2, 1), (1, 0))
        assert step.look_ups == {"model": 0.25, "statistics": 0.25}


class Working(Scripted):
    """A drafter that is a stack of two models."""

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        super().grow(tree, tokens, budget)
        return {"draft:small": Work(0.5, 4, 0, 0), "draft:mid": Work(0.25, 2, 4, 3)}


def test_a_step_says_what_every_draft_model_did_for_it() -> None:
    _, steps = run(Scripted(lambda tokens: []), Working(lambda tokens: [(7,)], "draft:mid"))
    for step in steps[:-1]:
        assert step.look_ups == {"context": 0.25, "draft:small": 0.5, "draft:mid": 0.25}
        assert step.levels == {"draft:small": (4, 0, 0), "draft:mid": (2, 4, 3)}
        assert step.proposed == {"draft:mid": 1}
    _, steps = run(oracle(3))
    assert all(step.levels == {} for step in steps), "databases make no forwards"


def test_the_rule_of_the_drafting_is_the_one_that_verifies() -> None:
    """By "rejection" a seed has another text, which drafts without a law do not change."""
    hot, texts = Generation(Sampling(1.0, seed=3), max_tokens=40), {}
    for rule in RULES:
        for ahead in (0, 0, 3):
            for wanted in (LONG, hot):
                drafting = Drafting(rule=rule)
                _, steps = run(oracle(ahead, wanted), generation=wanted, drafting=drafting)
                found = texts.setdefault((rule, wanted), [])
                found.append([token.id for step in steps for token in step.tokens])
    assert texts["match", hot] == [answer_of(hot)] * 3
    first, again, drafted = texts["rejection", hot]
    assert first == again == drafted != answer_of(hot)
    assert texts["match", LONG] == texts["rejection", LONG] == [answer_of()] * 3


def test_each_drafter_is_asked_with_what_there_is_and_the_same_budget() -> None:
    high, low = Scripted(lambda tokens: [(7, 8)]), Scripted(lambda tokens: [], "model")
    run(high, low, drafting=Drafting(nodes=6))
    depths = [LONG.max_tokens - 1 - at for at in range(LONG.max_tokens)]
    assert high.asked == [(0, 6, depth) for depth in depths if depth]
    assert low.asked[:-1] == [(2, 6, depth) for depth in depths if depth > 1]
    assert low.asked[-1] == (1, 6, 1)


@pytest.mark.parametrize("nodes", [0, 1, 3, 128])
def test_the_tree_never_exceeds_its_nodes(nodes: int) -> None:
    greedy = Scripted(lambda tokens: [(i,) for i in range(256)])
    _, steps = run(greedy, drafting=Drafting(nodes=nodes))
    assert {sum(step.proposed.values()) for step in steps[:-1]} == {nodes}


def test_costs_are_told_how_long_the_text_is_before_every_step() -> None:
    told: list[int] = []

    class Noting(CostCurve):
        def reach(self, length: int, unread: int = 0) -> None:
            told.append(length)

    _, steps = run(oracle(3), costs=Noting({0: 1.0, 9: 2.0}))
    lengths = [len(PROMPT)]
    for step in steps[:-1]:
        lengths.append(lengths[-1] + len(step.tokens))
    assert told == [len(PROMPT), *lengths], "first where the prompt is read"


@pytest.mark.parametrize("limit", [1, 2, 5, 11, 23])
def test_max_tokens_and_the_context_are_kept_to_the_token(limit: int) -> None:
    short, narrow = Generation(LONG.sampling, max_tokens=limit), ToyBackend(len(PROMPT) + limit)
    for drafters in ([], [oracle(20)]):
        for wanted, backend, finish in ((short, None, "length"), (LONG, narrow, "context")):
            _, steps = run(*drafters, generation=wanted, backend=backend)
            assert sum(len(step.tokens) for step in steps) == limit
            assert steps[-1].finish == finish


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("stop", "least"), [((), 6), (("zz", "e"), 0)])
def test_an_end_token_ends_the_answer_and_has_no_text(
    rule: Rule, stop: tuple[str, ...], least: int
) -> None:
    ended = 0
    for seed in range(60):
        generation = Generation(Sampling(1.5, seed=seed), max_tokens=60, stop=stop)
        _, steps = run(oracle(6, generation), generation=generation, drafting=Drafting(rule=rule))
        tokens = [token for step in steps for token in step.tokens]
        assert END not in [token.id for token in tokens[:-1]] and len(tokens) <= 60
        assert (tokens[-1].id == END) == (steps[-1].finish == "eos")
        assert not {*stop} & set("".join(token.text for token in tokens))
        if steps[-1].finish == "eos":
            ended += 1
            assert tokens[-1].text == "" or tokens[-1].text.startswith("\ufffd")
    assert ended >= least


def test_what_was_drafted_behind_the_end_is_not_emitted() -> None:
    def ended(seed: int) -> int:
        """The length of an answer that ends within a draft, not with a step's bonus token."""
        answer = answer_of(Generation(Sampling(temperature=1.5, seed=seed), max_tokens=60))
        return len(answer) if answer[-1] == END and len(answer) > 3 and len(answer) % 8 else 0

    seed = next(seed for seed in range(99) if ended(seed))
    generation = Generation(Sampling(temperature=1.5, seed=seed), max_tokens=60)
    truth = [*PROMPT, *answer_of(generation), 97, 98, 99]
    drafter = Scripted(lambda tokens: [truth[len(tokens) : len(tokens) + 7]])
    toy = ToyBackend()
    _, steps = run(drafter, generation=generation, backend=toy)
    assert [t.id for step in steps for t in step.tokens] == answer_of(generation)
    assert toy.cache == [*PROMPT, *answer_of(generation)][:-1]
    assert sum(steps[-1].accepted.values()) == len(steps[-1].tokens)


@pytest.mark.parametrize("ahead", [0, 1, 2, 5, 20])
def test_a_stop_string_ends_the_answer_wherever_the_steps_fall(ahead: int) -> None:
    text = bytes(token for token in answer_of() if token < 128).decode()
    stop = text[20:24]
    generation = Generation(LONG.sampling, max_tokens=60, stop=(stop,))
    _, steps = run(oracle(ahead), generation=generation)
    shown = "".join(token.text for step in steps for token in step.tokens)
    assert shown == text[: text.find(stop)] and steps[-1].finish == "stop"
    assert sum(len(step.tokens) for step in steps) == text.find(stop) + len(stop)


def test_half_a_stop_string_at_the_length_limit_is_shown() -> None:
    text = bytes(answer_of()[:10]).decode()
    generation = Generation(LONG.sampling, max_tokens=10, stop=(text[-2:] + "no such",))
    _, steps = run(generation=generation)
    assert "".join(token.text for step in steps for token in step.tokens) == text


@pytest.mark.parametrize("ahead", [1, 4])
def test_cancelling_keeps_what_was_emitted(ahead: int) -> None:
    whole = answer_of()
    for calls in range(2, 12):
        left = iter([False] * calls + [True] * 1000)
        drafter = oracle(ahead)
        _, steps = run(drafter, cancelled=lambda left=left: next(left))
        tokens = [token.id for step in steps for token in step.tokens]
        assert tokens == whole[: len(tokens)]
        assert steps[-1].finish == ("cancelled" if len(tokens) < len(whole) else "length")
        assert drafter.calls[-1] == ("finish", (*PROMPT, *tokens), len(tokens))


class BrokenOff(ToyBackend):
    """Somebody stopped it within its first prompt, or, with a limit, when that was reached."""

    limit: int | None = None

    def prefill(self, tokens: Sequence[int], cancelled: Callable[[], bool]) -> Filled:
        super().prefill(tokens, cancelled)
        return Filled(0, len(tokens) <= (self.limit or 0), self.limit)


@pytest.mark.parametrize("decided", [0, 5])
def test_a_prompt_that_was_not_read_whole_decides_nothing(decided: int) -> None:
    """Though nobody says any more that it is cancelled."""
    backend, drafter = BrokenOff(), oracle(3)
    backend.limit = len(PROMPT) + decided - 1 if decided else None
    _, *steps = decode(backend, PROMPT, [drafter], LONG, Drafting())
    assert all(isinstance(step, Step) for step in steps), "nothing was answered to be learned"
    assert steps[-1] == Step(len(steps) - 1, (), finish="cancelled")
    tokens = [token.id for step in steps for token in step.tokens]
    assert tokens == answer_of()[: len(tokens)] and (len(tokens) > 0) == (decided > 0)
    assert backend.forwards == len(steps) - 1


def test_cancelled_before_the_first_step_is_an_empty_step(toy: ToyBackend) -> None:
    drafter = oracle(2)
    prefill, steps = run(drafter, backend=toy, cancelled=lambda: True)
    assert steps == [Step(0, (), finish="cancelled")] and toy.forwards == 0
    assert drafter.calls[-1] == ("finish", tuple(PROMPT), 0)


def test_drafters_are_told_everything_once() -> None:
    drafter = oracle(3)
    _, steps = run(drafter)
    first, *rest, last = drafter.calls
    assert first == ("observe", tuple(PROMPT), len(PROMPT))
    for (_, before, _), (kind, after, new) in pairwise([first, *rest]):
        assert kind == "observe" and after[:-new] == before
    assert [new for _, _, new in rest] == [len(step.tokens) for step in steps]
    tokens = tuple(token.id for step in steps for token in step.tokens)
    assert last == ("finish", (*PROMPT, *tokens), len(tokens))


@pytest.mark.parametrize("taken", [1, 2, 5])
def test_a_consumer_that_leaves_early_still_ends_the_answer(taken: int) -> None:
    drafter = oracle(2)
    events = decode(ToyBackend(), PROMPT, [drafter], LONG, Drafting())
    seen: list[int] = []
    for _ in range(taken):
        event = next(events)
        seen += [token.id for token in event.tokens] if isinstance(event, Step) else []
    events.close()  # type: ignore[attr-defined]
    assert drafter.calls[-1] == ("finish", (*PROMPT, *seen), len(seen))
    assert [kind for kind, _, _ in drafter.calls].count("finish") == 1


def test_a_drafter_that_raises_is_heard_and_the_others_are_told() -> None:
    def fail(tokens: Sequence[int]) -> list[Sequence[int]]:
        if len(tokens) > len(PROMPT) + 4:
            raise RuntimeError("a bug in a drafter")
        return []

    other = oracle(1, name="model")
    with pytest.raises(RuntimeError, match="a bug in a drafter"):
        run(Scripted(fail), other)
    kind, tokens, new = other.calls[-1]
    assert kind == "finish" and list(tokens) == [*PROMPT, *answer_of()][: len(tokens)] and new >= 4


@pytest.mark.parametrize(
    ("prompt", "words"), [([], "empty"), ([97] * 50, "50 tokens"), ([97] * 90, "Shorten")]
)
def test_prompts_that_cannot_be_answered(prompt: list[int], words: str) -> None:
    drafter = oracle(1)
    with pytest.raises(PromptError, match=words):
        list(decode(ToyBackend(50), prompt, [drafter], LONG, Drafting()))
    assert drafter.calls == []


def test_a_backend_without_trees_is_never_given_one(toy: ToyBackend) -> None:
    toy.info = replace(toy.info, can_tree=False)
    drafter = oracle(3)
    _, steps = run(drafter, backend=toy)
    assert drafter.calls == [] and drafter.asked == []
    assert all(len(step.tokens) == 1 for step in steps)
    assert [token.id for step in steps for token in step.tokens] == answer_of()


def test_the_time_of_the_consumer_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("engine.decode.perf_counter", lambda: now[0])
    events: Iterator[Event] = decode(ToyBackend(), PROMPT, [oracle(2)], LONG, Drafting())
    for event in events:
        now[0] += 1000.0
        assert event.seconds == 0.0


def test_learning_the_answer_is_timed_behind_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("engine.decode.perf_counter", lambda: now[0])

    class Slow(Scripted):
        def finish(self, tokens: Sequence[int], new: int) -> None:
            now[0] += 5.0

    drafters = [Slow(lambda tokens: []), Slow(lambda tokens: [])]
    prefill, *steps, learned = decode(ToyBackend(), PROMPT, drafters, LONG, Drafting())
    assert isinstance(prefill, Prefill) and isinstance(learned, Learned)
    figures = summed(prefill, [step for step in steps if isinstance(step, Step)], learned)
    assert learned.seconds == figures.learning_seconds == figures.seconds == 10.0
    assert figures.decode_seconds == 0.0


def test_what_a_step_teaches_is_learned_within_the_time_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("engine.decode.perf_counter", lambda: now[0])

    def slow(controller: DraftController, step: Step, *times: object) -> None:
        now[0] += 1.0

    monkeypatch.setattr(DraftController, "observe", slow)
    prefill, *steps, learned = decode(ToyBackend(), PROMPT, [oracle(2)], LONG, Drafting())
    assert [event.seconds for event in (prefill, *steps)] == [0.0, 0.0, *[1.0] * (len(steps) - 1)]
    assert learned.seconds == 1.0


def test_probabilities_are_the_targets_own_before_any_cut() -> None:
    generation = Generation(Sampling(temperature=0.3, top_k=2, seed=4), max_tokens=12)
    _, plain = run(generation=generation)
    _, fast = run(oracle(4, generation), generation=generation)
    values = [[t.probability for s in steps for t in s.tokens] for steps in (plain, fast)]
    assert values[0] == values[1] and all(0 < value < 1 for value in values[0])
