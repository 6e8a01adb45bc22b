"""Streamed text: the pieces join to the text of all tokens, cut at the first stop string."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.backends.toy import ToyBackend
from engine.text import CUT, TextStream, behind, overlap, resumed

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


@pytest.mark.parametrize("size", range(1, 9))
def test_a_stop_string_that_shares_its_token_with_a_cut_sequence(size: int) -> None:
    data = "one END😀😀".encode()
    table = [data[i : i + size] for i in range(0, len(data), size)]

    def detokenize(tokens: Sequence[int]) -> str:
        return b"".join(table[token] for token in tokens).decode("utf-8", "replace")

    text = TextStream(detokenize, ["END"])
    pieces = []
    for number in range(len(table)):
        piece, stopped = text.push(number)
        pieces.append(piece)
        if stopped:
            break
    assert "".join(pieces) == "one " and stopped
    assert number == (data.index(b"D")) // size, "noticed with the very token that completes it"


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


def test_a_stop_string_at_the_very_end_and_an_empty_one() -> None:
    assert stream(b"abEND", ["END", ""]) == (["a", "b", "", "", ""], True)
    assert stream(b"ab", [""]) == (["a", "b", ""], False)


def test_half_a_stop_string_is_handed_out_at_the_end() -> None:
    assert "".join(stream(b"abEN", ["END"])[0]) == "abEN"


def test_of_two_stop_strings_within_one_token_the_earlier_one_counts() -> None:
    text = TextStream(lambda tokens: "one two three"[: 13 * len(tokens)], ["three", "two"])
    assert text.push(0) == ("one ", True)


def test_a_mark_in_a_stop_string_is_found_at_the_end_too() -> None:
    assert stream(b"ab\xf0", ["b" + CUT])[0] == ["a", "", "", ""]


@pytest.mark.parametrize(
    ("text", "string", "length"),
    [("ab", "bc", 1), ("ab", "abc", 2), ("abc", "abc", 0), ("aab", "aabaab", 3), ("", "a", 0)],
)
def test_overlap(text: str, string: str, length: int) -> None:
    assert overlap(text, string) == length


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
    text = behind(BYTES, ["never said"], list(begun.encode("utf-8")))
    told = "".join(text.push(token)[0] for token in rest.encode("utf-8"))
    assert told + text.flush() == rest
