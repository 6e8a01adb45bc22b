"""Where a guess was copied from: the last place before it, by tokens or by text, and no other."""

import pytest

from app.service.why import AROUND, Guess, Occurrence, Spoken, by_text, origin


def answer(key: str, *words: str) -> Spoken:
    """An answer of one token per word; equal words are equal tokens."""
    ends, text = [], ""
    for word in words:
        text += word
        ends.append(len(text))
    return Spoken(key, text, tuple(sum(map(ord, word)) for word in words), tuple(ends))


def wanted(*words: str, whole: bool = True) -> Guess:
    ids = answer("", *words).ids
    return Guess(ids[:-1], ids[-1], "".join(words), whole)


SAID = ("the", " cat", " sat", " and", " the", " cat", " ran", " and", " the", " cat", " sat")


def test_the_last_place_before_the_step_is_shown() -> None:
    own = answer("a", *SAID)
    found = origin([own], wanted(" the", " cat"), until=11)
    assert found is not None and (found.first, found.last) == (8, 9)
    found = origin([own], wanted(" the", " cat"), until=8)
    assert found == Occurrence(
        "a", 15, 23, 4, 5, "the cat sat and", " the cat", " ran and the cat sat"
    )
    assert own.text[found.start : found.end] == found.copied
    assert origin([own], wanted(" the", " cat"), until=5) is None, "it was not said yet"


def test_earlier_messages_are_looked_at_from_the_last_one_on() -> None:
    own = answer("c", "nothing")
    talk = [answer("a", *SAID), Spoken("u", "say: the cat sat."), answer("b", *SAID), own]
    found = origin(talk, wanted(" cat", " sat"), 0)
    assert found is not None and (found.key, found.first) == ("b", 9)
    found = origin([*talk[:2], own], wanted(" cat", " sat"), 0)
    assert found is not None and (found.key, found.copied, found.first) == ("u", " cat sat", -1)
    assert origin([talk[0], own], wanted(" cat", " flew"), 0) is None


def test_a_guess_at_the_beginning_comes_from_another_beginning() -> None:
    """More led to it than its answer holds: the same of another answer led there as well."""
    talk = [answer("a", *SAID), Spoken("u", "the"), answer("b", "so", "the", " cat"), answer("c")]
    found = origin(talk, wanted("the", whole=False), 0)
    assert found is not None and (found.key, found.first, found.last) == ("a", 0, 0)
    found = origin([*talk[:3], answer("c", "the")], wanted("the", " cat", whole=False), 1)
    assert found is not None and (found.key, found.start, found.end) == ("a", 0, 7)


@pytest.mark.parametrize(
    ("content", "text", "at"),
    [
        ("a bold cat, a b", " b", 13),
        ("a bold cat", " b", 1),
        ("x a b. a bold", " a b", 1),
        ("bold", " b", 0),
        ("hm, bold", " bold", 3),
        ("hm", " bold", None),
        ("hm", "  ", None),
        ("hm", "", None),
        ("aaa", "aa", 1),
        ("aab", "a", 1),
    ],
)
def test_text_is_found_as_whole_words_first(content: str, text: str, at: int | None) -> None:
    found = by_text(Spoken("u", content), text)
    assert (None if found is None else found.start) == at
    if found is not None:
        assert content[found.start : found.end] == found.copied
        assert text.strip() in found.copied


def test_surroundings_are_short_and_of_whole_words() -> None:
    long = by_text(Spoken("u", "x" * 500 + " cat " + "y" * 500), " cat")
    assert long is not None and long.before == "… " + "x" * AROUND
    assert long.after == " " + "y" * (AROUND - 1) + " …"
    place = by_text(Spoken("u", 20 * "alpha " + "cat" + 20 * " omega"), "cat")
    assert place is not None and set(place.before.split()) == {"…", "alpha"}
    assert set(place.after.split()) == {"…", "omega"}
    short = by_text(Spoken("u", "the cat sat"), " cat")
    assert short is not None and (short.before, short.after) == ("the", " sat")
