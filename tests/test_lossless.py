"""The promise: whatever drafts, in whatever order, the answer is the plain one, token by token."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import permutations

import pytest

from engine.backends.base import Backend
from engine.backends.toy import VOCABULARY, ToyBackend, ToyScores
from engine.chat import Chat
from engine.decode import decode, never
from engine.drafters.base import Drafter
from engine.methods import METHODS, Databases, method_named
from engine.sampling import choose
from engine.settings import POLICIES, Drafting, Generation, Sampling
from engine.tree import Tree
from engine.types import TIERS, Candidate, Continuation, Followers, Message, Prefill, Step, Token
from tests.conftest import ROOT

ORDERS = [order for size in (1, 2, 3) for order in permutations(TIERS, size)]
TEMPERATURES = (0.0, 0.7, 1.0, 1.5)
CUTS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
]
PROMPT = tuple(b"<once upon a time> once")
SEEDS = (0, 1, 7)


def events_of(
    backend: Backend,
    prompt: Sequence[int],
    generation: Generation,
    drafters: Sequence[Drafter] = (),
    drafting: Drafting | None = None,
    cancelled: Callable[[], bool] = never,
) -> list[Step]:
    drafting = drafting or Drafting()
    events = list(decode(backend, prompt, drafters, generation, drafting, cancelled))
    return [event for event in events if isinstance(event, Step)]


def tokens_of(steps: Sequence[Step]) -> list[Token]:
    return [token for step in steps for token in step.tokens]


def assert_lossless(plain: Sequence[Step], fast: Sequence[Step]) -> None:
    """Equal ids, positions, texts and ends; the probabilities up to what rounding may change."""
    left, right = tokens_of(plain), tokens_of(fast)
    assert [token.id for token in right] == [token.id for token in left]
    assert [token.position for token in right] == [token.position for token in left]
    assert [token.text for token in right] == [token.text for token in left]
    assert fast[-1].finish == plain[-1].finish
    values = [token.probability for token in left]
    assert [token.probability for token in right] == pytest.approx(values, rel=1e-3, abs=1e-6)


class Counts:
    """A table of texts in memory, made the slow and obvious way."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.behind: dict[tuple[int, ...], Counter[tuple[int, ...]]] = defaultdict(Counter)
        for text in texts:
            for at in range(1, len(text)):
                for size in range(1, min(3, at) + 1):
                    for ahead in range(1, 5):
                        if at + ahead <= len(text):
                            key = tuple(text[at - size : at])
                            self.behind[key][tuple(text[at : at + ahead])] += 1

    def look_up(self, key: Sequence[int]) -> Followers | None:
        found = self.behind.get(tuple(key))
        if found is None:
            return None
        total = sum(count for path, count in found.items() if len(path) == 1)
        paths = sorted(found.items(), key=lambda pair: (-pair[1], len(pair[0])))
        return Followers(total, tuple(Continuation(path, n / total) for path, n in paths[:40]))


@cache
def plain_toy(generation: Generation, prompt: tuple[int, ...] = PROMPT, context: int = 4096):
    return events_of(ToyBackend(context), prompt, generation)


@cache
def toy_table() -> Counts:
    draws = [
        Generation(Sampling(temperature, seed=seed), max_tokens=80)
        for temperature in TEMPERATURES
        for seed in range(3)
    ]
    return Counts([[*PROMPT, *(t.id for t in tokens_of(plain_toy(draw)))] for draw in draws])


def warm_toy() -> Databases:
    """Databases that hold past answers, this one's and others."""
    databases = Databases(statistics=toy_table())
    for seed in (5, 0, 1):
        answer = [t.id for t in tokens_of(plain_toy(generation(1.0, seed)))]
        databases.model.finish([*PROMPT, *answer], len(answer))
    return databases


def generation(temperature: float, seed: int, most: int = 50, **cuts: float) -> Generation:
    return Generation(Sampling(temperature=temperature, seed=seed, **cuts), max_tokens=most)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_every_subset_and_order_at_every_temperature(order: tuple[str, ...], policy: str) -> None:
    databases, accepted = warm_toy(), 0
    for temperature in TEMPERATURES:
        for seed in SEEDS:
            wanted = generation(temperature, seed)
            method = method_named("hd", Drafting(tiers=order, policy=policy, nodes=12))
            drafters = databases.drafters(method)
            fast = events_of(ToyBackend(), PROMPT, wanted, drafters, method.drafting)
            assert_lossless(plain_toy(wanted), fast)
            accepted += sum(sum(step.accepted.values()) for step in fast)
    assert accepted > 100, "a run that accepts nothing proves nothing"


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_every_method_with_every_cut(name: str, cuts: dict[str, float]) -> None:
    databases = warm_toy()
    for temperature in (0.7, 1.5):
        for seed in SEEDS:
            wanted = generation(temperature, seed, **cuts)
            drafters = databases.drafters(METHODS[name])
            fast = events_of(ToyBackend(), PROMPT, wanted, drafters, METHODS[name].drafting)
            assert_lossless(plain_toy(wanted), fast)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_published_method(temperature: float) -> None:
    databases, lengths = warm_toy(), []
    for seed in range(6):
        wanted = generation(temperature, seed)
        drafters = databases.drafters(METHODS["hd-published"])
        drafting = METHODS["hd-published"].drafting
        fast = events_of(ToyBackend(), PROMPT, wanted, drafters, drafting)
        assert_lossless(plain_toy(wanted), fast)
        lengths += [len(step.tokens) for step in fast]
    assert max(lengths) == 5, "four drafted tokens and the bonus"


@pytest.mark.parametrize("name", ["hd", "hd-published"])
def test_stop_strings_length_and_context_end_it_at_the_same_token(name: str) -> None:
    databases, method, ends = warm_toy(), METHODS[name], Counter[str | None]()
    for temperature in TEMPERATURES:
        for seed in range(6):
            text = "".join(t.text for t in tokens_of(plain_toy(generation(temperature, seed))))
            sampling = Sampling(temperature, seed=seed)
            for most, context, stop in [
                (1, 4096, ()),
                (2, 4096, ()),
                (17, 4096, ()),
                (80, len(PROMPT) + 1, ()),
                (80, len(PROMPT) + 13, ()),
                (80, 4096, (text[10:13] or "x",)),
                (80, 4096, (text[5:6] or "x", text[8:14] or "y")),
                (80, 4096, ("nowhere", "e")),
            ]:
                wanted = Generation(sampling, max_tokens=most, stop=stop)
                drafters = databases.drafters(method)
                fast = events_of(ToyBackend(context), PROMPT, wanted, drafters, method.drafting)
                assert_lossless(plain_toy(wanted, PROMPT, context), fast)
                ends[fast[-1].finish] += 1
    assert min(ends[end] for end in ("length", "context", "stop", "eos")) > 3


class Adversary:
    """A drafter made of a function; it learns nothing."""

    name = "model"

    def __init__(self, say: Callable[[Sequence[int]], list[Candidate]]) -> None:
        self.say = say

    def propose(self, tokens: Sequence[int], room: int, threshold: float) -> list[Candidate]:
        return self.say(tokens)

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Nothing to learn."""

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Nothing to learn."""


def garbage(tokens: Sequence[int]) -> list[Candidate]:
    draw = random.Random(len(tokens))
    return [
        Candidate(
            tuple(draw.randrange(-5, VOCABULARY + 50) for _ in range(draw.randrange(6))),
            draw.choice([0.0, 0.5, 1.0, -1.0, 7.0, float("nan")]),
            draw.randrange(9),
        )
        for _ in range(60)
    ]


def duplicates(tokens: Sequence[int]) -> list[Candidate]:
    return [Candidate((letter,), 0.9, 1) for letter in range(97, 123)] * 3


def deep(tokens: Sequence[int]) -> list[Candidate]:
    return [Candidate((97,) * depth, 1.0, 1) for depth in range(1, 200)]


def orphans_first(tokens: Sequence[int]) -> list[Candidate]:
    return [Candidate((letter, letter), 0.9, 1) for letter in range(97, 123)] + [
        Candidate((letter,), 0.1, 1) for letter in range(97, 123)
    ]


def everything(tokens: Sequence[int]) -> list[Candidate]:
    return [Candidate((token,), 1.0, 1) for token in range(VOCABULARY)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("adversary", [garbage, duplicates, deep, orphans_first, everything])
def test_adversarial_drafters_change_nothing(
    adversary: Callable[[Sequence[int]], list[Candidate]], policy: str
) -> None:
    for temperature in TEMPERATURES:
        for seed in (0, 1):
            wanted = generation(temperature, seed)
            drafters = [Adversary(adversary), *warm_toy().drafters(METHODS["hd"])]
            drafting = Drafting(policy=policy, nodes=40)
            fast = events_of(ToyBackend(), PROMPT, wanted, drafters, drafting)
            assert_lossless(plain_toy(wanted), fast)


def knowing(truth: Sequence[int], ahead: int = 7) -> Adversary:
    def say(tokens: Sequence[int]) -> list[Candidate]:
        rest = tuple(truth[len(tokens) : len(tokens) + ahead])
        return [Candidate(rest[: n + 1], 0.9**n, 1) for n in range(len(rest))]

    return Adversary(say)


@pytest.mark.parametrize("policy", POLICIES)
def test_drafting_the_known_answer_accepts_everything(policy: str) -> None:
    for temperature in TEMPERATURES:
        for seed in range(4):
            wanted = generation(temperature, seed)
            truth = [*PROMPT, *(t.id for t in tokens_of(plain_toy(wanted)))]
            drafting = Drafting(policy=policy, nodes=7)
            fast = events_of(ToyBackend(), PROMPT, wanted, [knowing(truth)], drafting)
            assert_lossless(plain_toy(wanted), fast)
            assert all(step.accepted == step.proposed for step in fast)
            assert len(fast) == -(-(len(truth) - len(PROMPT)) // 8)


def test_cancelling_at_every_step_leaves_a_prefix_and_a_usable_cache() -> None:
    wanted = generation(0.7, 3)
    plain = plain_toy(wanted)
    ids = [token.id for token in tokens_of(plain)]
    for at in range(1, 40):
        backend, databases = ToyBackend(), warm_toy()
        left: Iterator[bool] = iter([False] * at + [True] * 999)
        drafters = databases.drafters(METHODS["hd"])
        cut = events_of(backend, PROMPT, wanted, drafters, Drafting(), lambda left=left: next(left))
        kept = [token.id for token in tokens_of(cut)]
        assert kept == ids[: len(kept)]
        if kept == ids:
            assert_lossless(plain, cut)
            break
        assert cut[-1].finish == "cancelled"
        assert backend.cache == [*PROMPT, *kept][: len(backend.cache)]
        again = events_of(backend, PROMPT, wanted, databases.drafters(METHODS["hd"]))
        assert_lossless(plain, again)
    else:
        pytest.fail("the answer never came to its end")


def conversation(backend: Backend, method: str, turns: int, wanted: Generation) -> list[list[Step]]:
    """Several turns on one backend with warm tiers; each must equal a cold plain run."""
    chat, databases = Chat(backend), Databases(statistics=toy_table())
    messages: list[Message] = []
    runs = []
    for turn in range(turns):
        messages.append(Message("user", f"and the tale of {turn} then"))
        prompt = chat.prompt(messages)
        drafters = databases.drafters(METHODS[method])
        events = list(chat.reply(prompt, drafters, wanted, METHODS[method].drafting))
        prefill = events[0]
        assert isinstance(prefill, Prefill)
        assert (prefill.reused > 0) == (turn > 0)
        steps = [event for event in events if isinstance(event, Step)]
        assert_lossless(cold(backend, prompt, wanted), steps)
        messages.append(Message("assistant", "".join(t.text for t in tokens_of(steps)) or "-"))
        runs.append(steps)
    return runs


def cold(backend: Backend, prompt: Sequence[int], wanted: Generation) -> list[Step]:
    if isinstance(backend, ToyBackend):
        return events_of(ToyBackend(), prompt, wanted)
    from engine.backends.transformers import TransformersBackend

    assert isinstance(backend, TransformersBackend)
    other = TransformersBackend(backend.model, backend.tokenizer, backend.info)
    return events_of(other, prompt, wanted)


@pytest.mark.parametrize("method", ["hd", "hd-published"])
def test_a_warm_conversation_says_what_a_cold_one_does(method: str) -> None:
    for temperature in TEMPERATURES:
        conversation(ToyBackend(), method, 4, generation(temperature, 11, most=40))


def run_hd(wanted: Generation) -> list[Step]:
    truth = [*PROMPT, *(t.id for t in tokens_of(plain_toy(wanted)))]
    wrong = truth[: len(PROMPT) + 9] + [98] * 60
    drafters = [knowing(wrong), *warm_toy().drafters(METHODS["hd"])]
    return events_of(ToyBackend(), PROMPT, wanted, drafters, Drafting(nodes=20))


def lenient_walk(tree: Tree, choose: Callable[[int], int]) -> tuple[list[int], list[int]]:
    """Broken on purpose: takes the first child of a node, whatever the target says."""
    rows: list[int] = []
    emitted = [choose(0)]
    here = 0
    while child := next((r for r in range(len(tree) + 1) if tree.parents[r] == here), None):
        rows.append(child)
        emitted[-1] = tree.tokens[child]
        emitted.append(choose(child))
        here = child
    return rows, emitted


def shifted_choice(scores: ToyScores, row: int) -> int:
    """Broken on purpose: noise that depends on the row of the tree."""
    return choose(scores.rows[row], scores.sampling, scores.positions[row] + row)


def forgetful_accept(backend: ToyBackend, rows: Sequence[int]) -> None:
    """Broken on purpose: the last accepted row is lost."""
    assert backend.tree is not None
    backend.cache += [backend.tree.tokens[row] for row in (0, *rows[:-1])]


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (Tree, "walk", lenient_walk),
        (ToyScores, "choose", shifted_choice),
        (ToyBackend, "accept", forgetful_accept),
    ],
)
def test_a_broken_engine_fails_this_test(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Callable[..., object]
) -> None:
    wanted = generation(1.0, 0)
    plain = plain_toy(wanted)
    assert_lossless(plain, run_hd(wanted))
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError):
        assert_lossless(plain, run_hd(wanted))


# The same with a real model: the embedded target in float32, the shipped statistics.

QUESTIONS = (
    "Tell me a story about a fox who wanted to learn how to swim.",
    "Explain in simple words why the sky is blue.",
)
STEPS = 40


@pytest.fixture(scope="module")
def warm(embedded):  # type: ignore[no-untyped-def]
    """The prompts, their plain answers (computed once), and databases that hold past answers."""
    from storage.statistics import find_table

    table = find_table(embedded.info.tokenizer_fingerprint, ROOT / "assets" / "statistics")
    assert table is not None, "the shipped statistics are for the embedded model's tokenizer"
    chat = Chat(embedded)
    prompts = [tuple(chat.prompt([Message("user", q)], known=())) for q in QUESTIONS]

    @cache
    def plain(wanted: Generation, number: int) -> list[Step]:
        embedded.reset()
        return events_of(embedded, prompts[number], wanted)

    def databases() -> Databases:
        filled = Databases(statistics=table)
        for number, prompt in enumerate(prompts):
            for temperature in (0.0, 0.7):
                wanted = generation(temperature, 0, STEPS)
                answer = [t.id for t in tokens_of(plain(wanted, number))]
                filled.model.finish([*prompt, *answer], len(answer))
        return filled

    yield prompts, plain, databases
    table.close()
    embedded.reset()


@pytest.mark.model
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_embedded_every_subset_and_order(embedded, warm, order) -> None:  # type: ignore[no-untyped-def]
    prompts, plain, databases = warm
    filled, accepted = databases(), 0
    policy = POLICIES[ORDERS.index(order) % 2]
    method = method_named("hd", Drafting(tiers=order, policy=policy))
    for number, temperature in enumerate(TEMPERATURES):
        wanted = generation(temperature, number, STEPS)
        prompt = prompts[number % 2]
        fast = events_of(embedded, prompt, wanted, filled.drafters(method), method.drafting)
        assert_lossless(plain(wanted, number % 2), fast)
        accepted += sum(sum(step.accepted.values()) for step in fast)
    assert accepted > 0


@pytest.mark.model
@pytest.mark.parametrize("name", ["hd", "hd-published"])
@pytest.mark.parametrize("cuts", [{"top_k": 20}, {"top_p": 0.8, "min_p": 0.05}, {}], ids=str)
def test_embedded_methods_with_cuts(embedded, warm, name, cuts) -> None:  # type: ignore[no-untyped-def]
    prompts, plain, databases = warm
    filled = databases()
    for seed, temperature in ((2, 0.7), (3, 1.0)):
        wanted = generation(temperature, seed, STEPS, **cuts)
        drafters = filled.drafters(METHODS[name])
        fast = events_of(embedded, prompts[0], wanted, drafters, METHODS[name].drafting)
        assert_lossless(plain(wanted, 0), fast)


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_embedded_knowing_the_answer_accepts_everything(embedded, warm, temperature) -> None:  # type: ignore[no-untyped-def]
    prompts, plain, _ = warm
    wanted = generation(temperature, 0, STEPS)
    truth = [*prompts[0], *(t.id for t in tokens_of(plain(wanted, 0)))]
    fast = events_of(embedded, prompts[0], wanted, [knowing(truth)])
    assert_lossless(plain(wanted, 0), fast)
    assert all(step.accepted == step.proposed for step in fast)


@pytest.mark.model
def test_embedded_a_warm_conversation_says_what_a_cold_one_does(embedded) -> None:  # type: ignore[no-untyped-def]
    embedded.reset()
    for temperature in (0.0, 1.0):
        embedded.reset()
        conversation(embedded, "hd", 3, generation(temperature, 5, 24))
