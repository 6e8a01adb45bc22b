"""Chat: what a second turn takes over from the first, and what is dropped when it grows long."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.backends.base import common_prefix
from engine.errors import PromptError
from engine.prompt import BLOCKS, CUT, Chat, TextStream, continued, resumed, splice
from engine.settings import Drafting, Generation, Sampling
from engine.thinking import MARKS
from engine.types import Message, Prefill, Step, Tool
from tests.support.replies import reply
from tests.support.thinking import Thinking
from tests.support.toy import END, ToyBackend


class Merging(ToyBackend):
    """A toy whose tokenizer merges pairs: "th" is one token, but a model may say "t", "h" too."""

    PAIRS = {300: b"th", 301: b"he", 302: b"ab"}

    def __init__(self) -> None:
        super().__init__()
        self.info = replace(self.info, vocabulary_size=303)

    def tokenize(self, text: str) -> list[int]:
        tokens = super().tokenize(text)
        for merged, pair in self.PAIRS.items():
            at = 0
            while at < len(tokens) - 1:
                if tokens[at : at + 2] == list(pair):
                    tokens[at : at + 2] = [merged]
                at += 1
        return tokens

    def detokenize(self, tokens: Sequence[int]) -> str:
        return super().detokenize([b for t in tokens for b in self.PAIRS.get(t, [t])])


def say(
    chat: Chat, messages: list[Message], seed: int = 0, stop: tuple[str, ...] = (), most: int = 30
) -> tuple[Prefill, str, list[int], str | None]:
    """One turn: the prefill, the answer's text and tokens, and why it ended."""
    generation = Generation(Sampling(temperature=1.5, seed=seed), max_tokens=most, stop=stop)
    first, *events = reply(chat, chat.prompt(messages), [], generation, Drafting())
    assert isinstance(first, Prefill)
    steps = [event for event in events if isinstance(event, Step)]
    tokens = [token for step in steps for token in step.tokens]
    text = "".join(token.text for token in tokens)
    return first, text, [token.id for token in tokens], steps[-1].finish


def user(text: str) -> Message:
    return Message("user", text)


@pytest.mark.parametrize("backend", [ToyBackend, Merging])
def test_a_second_turn_prefills_only_its_new_words(backend: type[ToyBackend]) -> None:
    """Also when the first answer ended at its length, in the middle of a word or of a character."""
    ends: list[str | None] = []
    for seed in range(100):
        chat, messages = Chat(backend()), [user("tell me the ab")]
        _, text, _, finish = say(chat, messages, seed)
        if text != text.strip():
            continue  # the template trims answers, so their tokens are others
        known = list(chat.tokens)
        messages += [Message("assistant", text), user("the next thing")]
        prefill, *_ = say(chat, messages, seed + 1)
        new = "<|user|>the next thing<|end|><|assistant|>"
        new = new if finish == "eos" else f"<|end|>{new}"
        ends.append(finish)
        assert prefill.tokens == len(known) + len(chat.backend.tokenize(new))
        # The last token of a run is emitted but never in the cache.
        assert prefill.reused == len(known) - 1
    assert ends.count("eos") > 5 < ends.count("length")


def test_tokens_that_are_not_canonical_are_taken_over() -> None:
    """The model said "t", "h"; the tokenizer would say "th", and the cache would be worthless."""
    chat = Chat(Merging())
    prompt = chat.prompt([user("go")])
    chat.tokens = [*prompt, *b"the ab", END]
    following = chat.prompt([user("go"), Message("assistant", "the ab"), user("the end")])
    assert following[: len(chat.tokens)] == chat.tokens
    assert following[len(chat.tokens) :] == chat.backend.tokenize(
        "<|user|>the end<|end|><|assistant|>"
    )
    assert 300 in following[len(chat.tokens) :]


def test_an_edited_message_keeps_what_comes_before_it() -> None:
    chat = Chat(Merging())
    first = [user("the first"), Message("assistant", "ab")]
    chat.tokens = [*chat.backend.tokenize(chat.backend.render(first[:1])), 97, 98, END]
    kept = len(chat.tokens)
    chat.tokens += chat.backend.tokenize("<|user|>the second<|end|><|assistant|>") + [104, 105, END]
    edited = chat.prompt([*first, user("the third")])
    assert edited[:kept] == chat.tokens[:kept]
    assert chat.backend.detokenize(edited) == chat.backend.render([*first, user("the third")])


@pytest.mark.parametrize("before", [None, True, False])
@pytest.mark.parametrize("after", [None, True, False])
def test_thinking_is_switched_between_two_turns(before: bool | None, after: bool | None) -> None:
    """What the cache holds is taken over as far as it says what the template now says."""
    chat, first = Chat(Thinking()), [user("why")]
    prompt, _ = chat.fit(first, thinking=before)
    assert chat.backend.detokenize(prompt) == chat.backend.render(first, before)
    chat.tokens = [*prompt, *b"so", END]
    messages = [*first, Message("assistant", "so"), user("and")]
    following, _ = chat.fit(messages, thinking=after)
    assert following == chat.prompt(messages, thinking=after)
    assert chat.backend.detokenize(following) == chat.backend.render(messages, after)
    shared = common_prefix(following, chat.tokens)
    assert shared == len(chat.tokens) or before is False and shared >= len(b"why") + 3


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    st.lists(st.sampled_from([97, 98, 116, 104, 101, END, 257, 300, 301, 302, 0xE2, 0x82, 0xAC])),
    st.text(alphabet="abthe€ ", max_size=12),
    st.integers(0, 30),
)
def test_spliced_tokens_always_read_as_the_text(known: list[int], more: str, cut: int) -> None:
    backend = Merging()
    text = backend.detokenize(known)
    for wanted in (text + more, text[:cut] + more, more):
        tokens = splice(backend, wanted, known)
        assert backend.detokenize(tokens) == wanted


class Prefixing(ToyBackend):
    """Like a tokenizer that begins every text with a space, which reading drops again."""

    def tokenize(self, text: str) -> list[int]:
        return super().tokenize(f" {text}")

    def detokenize(self, tokens: Sequence[int]) -> str:
        return super().detokenize(tokens).removeprefix(" ")


def test_a_tokenizer_that_would_add_a_space_at_the_seam_starts_afresh() -> None:
    backend = Prefixing()
    known = backend.tokenize("<|user|>hi")
    tokens = splice(backend, "<|user|>hi there", known)
    assert tokens == backend.tokenize("<|user|>hi there")
    assert backend.detokenize(tokens) == "<|user|>hi there"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [user("")],
        [user(" \n\t ")],
        [Message("system", "be kind")],
        [user("a"), Message("assistant", "b")],
        [user("a"), Message("assistant", "b"), user(" ")],
    ],
)
def test_nothing_to_answer(messages: list[Message]) -> None:
    with pytest.raises(PromptError, match="empty"):
        Chat(ToyBackend()).prompt(messages)


def history(turns: int, system: bool = False) -> list[Message]:
    messages = [Message("system", "be kind")] if system else []
    for turn in range(turns):
        messages += [user(f"question {turn:03}"), Message("assistant", f"answer {turn:03}")]
    return [*messages, user("last")]


def kept(messages: list[Message], dropped: int) -> list[Message]:
    head = messages[:1] if messages[0].role == "system" else []
    return [*head, *messages[len(head) + dropped :]]


@pytest.mark.parametrize("system", [False, True])
def test_the_oldest_exchanges_are_dropped_and_the_system_prompt_stays(system: bool) -> None:
    chat = Chat(ToyBackend(context_length=400))
    messages = history(30, system)
    prompt, dropped = chat.fit(messages)
    assert dropped > 0 and dropped % 2 == 0
    assert prompt == chat.prompt(kept(messages, dropped)) and len(prompt) <= 300
    block, largest = 300 // BLOCKS, len(chat.prompt(history(1)))
    fewer = chat.prompt(kept(messages, dropped - 2))
    assert len(fewer) > 300 or len(prompt) > 300 - block - largest, "a block is dropped, no more"


def goes_on(chat: Chat, messages: list[Message], prompt: list[int]) -> None:
    """The prompt is answered, and something else is said."""
    chat.tokens = [*prompt, *f"answer {len(messages):03}".encode(), END]
    said = [Message("assistant", f"answer {len(messages):03}"), user(f"more {len(messages):03}")]
    messages += said


@pytest.mark.parametrize("system", [False, True])
def test_a_conversation_that_outgrows_the_context_seldom_reads_its_prompt_again(
    system: bool,
) -> None:
    """Turns begin with the tokens of the turn before, but where another block is left out."""
    chat = Chat(ToyBackend(context_length=1200))
    again, cuts, turns = list[int](), list[int](), 120
    messages = history(10, system)
    for _ in range(turns):
        prompt, dropped = chat.fit(messages)
        again.append(len(prompt) - common_prefix(chat.tokens, prompt))
        cuts.append(dropped)
        goes_on(chat, messages, prompt)
    exchange = len(chat.prompt(history(1)))
    whole = [tokens for tokens in again if tokens > 2 * exchange]
    assert cuts == sorted(cuts) and cuts[-1] > 100
    assert len(whole) <= len(set(cuts)) <= 2 + BLOCKS * turns * exchange // 900
    assert sum(again) < 4 * turns * exchange + 900, "not the whole prompt turn after turn"


class Counting(ToyBackend):
    """Counts the characters that are tokenized and the texts that are made of conversations."""

    def __init__(self, context_length: int = 4096) -> None:
        super().__init__(context_length)
        self.characters = self.renders = 0

    def tokenize(self, text: str) -> list[int]:
        self.characters += len(text)
        return list(text.encode()) if "<|" not in text else super().tokenize(text)

    def render(
        self, messages: Sequence[Message], thinking: bool | None = None, tools: Sequence[Tool] = ()
    ) -> str:
        self.renders += 1
        return super().render(messages, thinking)


def test_a_turn_tokenizes_what_is_new_and_no_more() -> None:
    chat = Chat(Counting(context_length=20_000))
    backend = chat.backend
    assert isinstance(backend, Counting)
    messages = history(5)
    for _ in range(60):
        backend.characters = backend.renders = 0
        chat.check(messages[-1].content)
        prompt, dropped = chat.fit(messages)
        new = len(backend.detokenize(prompt[common_prefix(chat.tokens, prompt) :]))
        assert not dropped and backend.characters == new and backend.renders == 2
        goes_on(chat, messages, prompt)


@pytest.mark.parametrize("turns", [80, 320, 1280])
def test_the_work_to_fit_a_conversation_does_not_grow_with_its_square(turns: int) -> None:
    chat = Chat(Counting(context_length=1200))
    backend = chat.backend
    assert isinstance(backend, Counting)
    messages = history(turns)
    _, dropped = chat.fit(messages)
    whole = len(backend.render(messages))
    assert dropped and backend.characters < 2 * whole + 3 * 1200 and backend.renders <= 6
    backend.characters = backend.renders = 0
    more = [*messages, Message("assistant", "and so on"), user("more")]
    chat.fit(more)
    assert backend.characters < 5 * 1200 and backend.renders <= 6, "the old ones are known"


def test_a_last_message_that_leaves_little_room_is_still_answered() -> None:
    chat = Chat(ToyBackend(context_length=200))
    text = "x" * (200 - 3 - 1)
    prompt, dropped = chat.fit([*history(2)[:-1], user(text)])
    assert (prompt, dropped) == (chat.prompt([user(text)]), 4)
    assert len(prompt) == 199


def test_a_last_message_that_is_too_long_is_refused_with_both_numbers() -> None:
    chat = Chat(ToyBackend(context_length=1200))
    with pytest.raises(PromptError, match=r"1,503 tokens.*1,200"):
        chat.fit([*history(2)[:-1], user("x" * 1500)])
    with pytest.raises(PromptError, match=r"1,503 tokens.*1,200"):
        chat.check("x" * 1500)
    with pytest.raises(PromptError, match="empty"):
        chat.check(" ")
    chat.check("x" * 1100)


def test_measuring_says_what_an_answer_would_read_and_changes_nothing() -> None:
    backend = ToyBackend()
    chat = Chat(backend)
    turns = [user("first " * 20), Message("assistant", "yes " * 20), user("second " * 20)]
    say(chat, turns[:1])
    before = [*chat.tokens], [*backend.cache]
    small = chat.measure(turns)
    assert (small.tokens, small.dropped, small.fits) == (len(chat.prompt(turns, ())), 0, True)
    assert small.room == chat.room < backend.info.context_length
    many = turns[:2] * 40 + turns[2:]
    large = chat.measure(many)
    assert large.tokens > large.room and large.fits
    assert large.dropped == chat.fit(many)[1] > 0
    long = chat.measure([*turns[:2], user("word " * 5000)])
    assert (long.dropped, long.fits) == (2, False)
    assert chat.measure([]).tokens == 0
    assert (chat.tokens, backend.cache) == before


def test_earlier_answers_are_without_thinking_that_the_template_refuses() -> None:
    """The template of gpt-oss raises an error for an answer with channels in it."""
    said = "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes."
    messages = [Message("user", "a"), Message("assistant", said), Message("user", said)]
    for marks, answer in ((MARKS[7], "Yes."), (MARKS[0], said)):
        backend = ToyBackend()
        backend.info = replace(backend.info, marks=(marks,))
        assert Chat(backend).text(messages) == (
            f"<|user|>a<|end|><|assistant|>{answer}<|end|><|user|>{said}<|end|><|assistant|>"
        )


# from tokens to text


BYTES = ToyBackend().detokenize
PIECES = ["a", "b", "ab", " ", "é", "日本", "😀", "👩‍👩‍👧‍👦", "<", "end>", "\x00", "\n", CUT]


def stream(
    tokens: Sequence[int], stop: Sequence[str] = (), detokenize=BYTES
) -> tuple[list[str], bool]:
    text = TextStream(detokenize, stop)
    pieces = []
    for token in tokens:
        piece, stopped = text.push(token)
        pieces.append(piece)
        if stopped:
            return pieces, True
    return [*pieces, text.flush()], False


def first_stop(text: str, stop: Sequence[str]) -> str | None:
    """What a reader who gets the text character by character sees before a stop string is whole."""
    for size in range(1, len(text) + 1):
        ends = [text[:size].find(string) for string in stop if string and string in text[:size]]
        if ends:
            return text[: min(ends)]
    return None


@settings(deadline=None, derandomize=True, max_examples=500)
@given(st.binary(max_size=60))
@example(b"x" * 13 + "😀😀😀".encode())
@example("日本語".encode() * 9)
@example(b"\xff" * 40 + "😀".encode())
@example(b"\xf0\x9f\x98")
@example(b"\xff\xf0\xff\xff\xff\xf0\x9f\x98\x80\xe6\x97")
def test_any_bytes_are_streamed_whole(data: bytes) -> None:
    pieces, stopped = stream(list(data))
    assert "".join(pieces) == data.decode("utf-8", "replace") and not stopped


@settings(deadline=None, derandomize=True, max_examples=500)
@given(
    st.lists(st.sampled_from(PIECES), max_size=30).map("".join),
    st.lists(
        st.sampled_from(["ab", "b<", "aa", "日", "本😀", "end>", "<end>", "abab", "\n\n", "👧"])
    ),
)
def test_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    pieces, stopped = stream(list(text.encode()), stop)
    cut = first_stop(text, stop)
    assert ("".join(pieces), stopped) == ((text, False) if cut is None else (cut, True))


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join), st.integers(1, 7))
def test_long_tokens_and_cut_sequences_within_them(text: str, size: int) -> None:
    """Tokens of several bytes that begin and end inside of characters, as byte-level BPE has."""
    data = text.encode()
    table = [data[i : i + size] for i in range(0, len(data), size)]

    def detokenize(tokens: Sequence[int]) -> str:
        return b"".join(table[token] for token in tokens).decode("utf-8", "replace")

    pieces, _ = stream(range(len(table)), (), detokenize)
    assert "".join(pieces) == text


def fallback(tokens: Sequence[int]) -> str:
    """Byte fallback as the tokenizers library does it: a run of bytes is text or all marks."""
    text, run = "", b""
    for token in [*tokens, None]:
        if token is not None and token < 256:
            run += bytes([token])
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += CUT * len(run)
        run = b""
        text += "" if token is None else WORDS[token - 256]
    return text


WORDS = [" the", " a", "x"]


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.lists(st.sampled_from(["😀", "日", "é", 256, 257, 258]), max_size=40))
@example(["日"] * 40)
@example([256, *["😀"] * 20])
@example([256, 257, "日", "é", *["日"] * 20])
def test_runs_of_fallback_bytes_are_streamed_whole(parts: list[str | int]) -> None:
    tokens: list[int] = []
    for part in parts:
        tokens += [part] if isinstance(part, int) else part.encode()
    pieces, _ = stream(tokens, (), fallback)
    assert "".join(pieces) == fallback(tokens)
    assert CUT not in "".join(pieces)


def stripping(tokens: Sequence[int]) -> str:
    """A tokenizer whose first word loses its leading space, whichever token comes first."""
    return "".join(WORDS[token] for token in tokens).removeprefix(" ")


@given(st.lists(st.integers(0, 2), max_size=60))
@settings(deadline=None, derandomize=True)
def test_spaces_that_depend_on_the_left_neighbour_survive_the_window(tokens: list[int]) -> None:
    pieces, _ = stream(tokens, (), stripping)
    assert "".join(pieces) == stripping(tokens)


def test_nothing_is_held_without_need() -> None:
    text = TextStream(BYTES, ["STOP"])
    assert [text.push(b)[0] for b in b"a STAR"] == ["a", " ", "", "", "STA", "R"]


def test_text_appears_with_the_last_byte_of_its_character() -> None:
    text = TextStream(BYTES, ())
    assert [text.push(b)[0] for b in "é😀!".encode()] == ["", "é", "", "", "", "😀", "!"]


def test_bytes_that_are_no_text_do_not_wait_for_the_end() -> None:
    pieces, _ = stream([0xFF] * 30)
    assert "".join(pieces[:-1]) == CUT * 27
    assert pieces[-1] == CUT * 3


def test_the_window_stays_small() -> None:
    for data in (b"a" * 300, "😀".encode() * 80, b"\xff" * 300):
        sizes: list[int] = []

        def detokenize(tokens: Sequence[int], sizes: list[int] = sizes) -> str:
            sizes.append(len(tokens))
            return BYTES(tokens)

        stream(list(data), (), detokenize)
        assert max(sizes) <= 24


def test_of_two_stop_strings_within_one_token_the_earlier_one_counts() -> None:
    text = TextStream(lambda tokens: "one two three"[: 13 * len(tokens)], ["three", "two"])
    assert text.push(0) == ("one ", True)


def test_a_mark_in_a_stop_string_is_found_at_the_end_too() -> None:
    assert stream(b"ab\xf0", ["b" + CUT])[0] == ["a", "", "", ""]


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.lists(st.sampled_from(PIECES), max_size=12), st.lists(st.sampled_from(PIECES), max_size=2)
)
@example(["a", "😀", "end>", "b"], ["nd>b"])
def test_a_stream_goes_on_anywhere_as_if_it_had_never_ended(
    parts: list[str], stop: list[str]
) -> None:
    tokens = list("".join(parts).encode("utf-8"))
    pieces, stopped = stream(tokens, stop)
    until = len(pieces) - 1 if stopped else len(tokens)
    for cut in range(until):
        text, told = resumed(BYTES, stop, tokens[:cut])
        assert told == "".join(pieces[:cut])
        rest = [text.push(token) for token in tokens[cut : until + stopped]]
        assert [piece for piece, _ in rest] == pieces[cut : cut + len(rest)]
        assert [end for _, end in rest] == [*[False] * (len(rest) - 1), stopped][-len(rest) :]


def test_a_stop_string_that_ended_nothing_counts_from_there_on() -> None:
    tokens = list(b"one STOP two STOP three")
    text, told = resumed(BYTES, ["STOP"], tokens[:11])
    assert told == "one STOP tw"
    pieces = [text.push(token) for token in tokens[11:]]
    ended = [end for _, end in pieces].index(True)
    assert "".join(piece for piece, _ in pieces[: ended + 1]) == "o "


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.lists(st.sampled_from(PIECES), max_size=12), st.integers(0, 12))
def test_behind_a_text_only_what_is_new_is_told(parts: list[str], cut: int) -> None:
    begun, rest = "".join(parts[:cut]), "".join(parts[cut:])
    text = continued(BYTES, ["never said"], list(begun.encode("utf-8")))
    told = "".join(text.push(token)[0] for token in rest.encode("utf-8"))
    assert told + text.flush() == rest
