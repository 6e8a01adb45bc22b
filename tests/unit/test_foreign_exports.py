"""What is read of the exports of other programs: each turn is imported, or counted as left out."""

import copy
import io
import json
import random
import re
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest

from engine.errors import StorageError
from storage import imports
from storage.exported import Export
from tests.support.exports import CITED, SAMPLES, alone, chatgpt, messages_of, node
from tests.support.odd import ODD

WORD = re.compile(r"(?:kept|tool|thought)-[a-z]")


def one(value: Any) -> Export:
    """The only conversation of a file with that value."""
    (export,) = imports.read_file(json.dumps(value).encode(), 9).conversations
    return export


def contents(export: Export) -> list[str]:
    return [export.system_prompt, *(message.content for message in export.messages)]


@pytest.mark.parametrize("name", SAMPLES)
def test_what_was_said_is_imported_and_everything_else_is_counted(name: str) -> None:
    export = one([SAMPLES[name]] if name != "messages" else SAMPLES[name])
    text = "\n".join(contents(export))
    sample_words = set(WORD.findall(json.dumps(SAMPLES[name])))
    assert set(WORD.findall(text)) == {word for word in sample_words if not word.startswith("tool")}
    for content in contents(export):
        answer = re.sub(r"(?s)<think>.*?</think>", "", content)
        assert "thought" not in answer, "thinking stands before the answer, between its marks"
        assert not re.search(r"details|summary|AGENTIC|TOOL_|\ue200|tool_call", answer)
    assert sum(export.left_out.values()) >= len(
        {word for word in sample_words if word[:4] == "tool"}
    )


def left(text: str, **more: Any) -> tuple[str, dict[str, int]]:
    """What is imported of an answer in ChatGPT's export, and what is left out."""
    (message,) = (export := one(chatgpt(node("a", "root", "assistant", text, **more)))).messages
    return message.content, dict(export.left_out)


@pytest.mark.parametrize(
    ("answer", "text", "out"),
    [
        (f"It rains {CITED}.", "It rains.", {"citations": 1}),
        ("It rains【12†source】 and【3:1†L2-L4】.", "It rains and.", {"citations": 2}),
        ("So citeturn0search1turn2view0 it is", "So  it is", {"citations": 1}),
        ("A:contentReference[oaicite:0]{index=0}.", "A.", {"citations": 1}),
        ('In \ue200entity\ue202["city","Paris","x"]\ue201!', "In Paris!", {}),
        (':::writing{variant="email" id="1"}\nDear A,\n:::\nWell?', "Dear A,\nWell?", {}),
        (":::note\nMind.\n:::\n", ":::note\nMind.\n:::\n", {}),
        ('`<details type="x">` and `【1†a】`', '`<details type="x">` and `【1†a】`', {}),
        ("```\n<tool_call>\n```\nx", "```\n<tool_call>\n```\nx", {}),
        ("<details><summary>a</summary>b</details>", None, {}),
        ('A <details type="tool_calls"> never ended', "A  never ended", {"tool calls": 1}),
        ("A\n<tool_call>{}</tool_call>\nB", "A\n\nB", {"tool calls": 1}),
        ('A\n<tool_call>\n{"name": "cut', "A", {"tool calls": 1}),
        ("They write\n<tool_call>\nand then the call. More.", None, {}),
        ("A <code_interpreter> is a tag.", None, {}),
        ('```\nunclosed <details type="x">y</details>', None, {}),
        ("a ` b <code_interpreter lang='x'>c</code_interpreter>d", "a ` b d", {"tool calls": 1}),
        # Thinking that a template opened is thinking.
        ("Hm.\n</think>\n\nYes.", "<think>\nHm.\n</think>\n\nYes.", {}),
        ("<think>\nHm.\n</think>\n\nYes.", None, {}),
        ("It ends so:\n```\n</think>\n```\nYes.", None, {}),
        ("Between `<think>` and\n</think>\nit thinks.", None, {}),
    ],
)
def test_markup_of_another_program_is_no_answer(
    answer: str, text: str | None, out: dict[str, int]
) -> None:
    assert left(answer) == (answer if text is None else text, out)


def test_a_citation_whose_link_is_known_becomes_it() -> None:
    links = [{"matched_text": CITED, "alt": "([a](https://a.example))"}, {"matched_text": " "}]
    assert left(f"Rain {CITED}.", metadata={"content_references": links}) == (
        "Rain ([a](https://a.example)).",
        {},
    )


def test_what_the_user_wrote_is_never_cleaned() -> None:
    text = f'<details type="tool_calls">\n{CITED} 【1†a】\n</details>'
    assert contents(one([{"role": "user", "content": text}]))[1] == text


def test_thinking_goes_to_the_answers_after_it() -> None:
    thoughts = {"content_type": "thoughts", "thoughts": [{"summary": "S", "content": "C</think>"}]}
    value = chatgpt(
        node("u", "root", "user", "Why?"),
        node("t", "u", "assistant", thoughts),
        node("k", "t", "assistant", {"content_type": "code", "text": "x"}, recipient="web"),
        node("a", "k", "assistant", "First"),
        node("b", "k", "assistant", "Second"),
        node("v", "b", "user", "And?"),
        node("w", "v", "assistant", thoughts),
    )
    export = one(value)
    mark = "<think>\nS\nC</ think>\n</think>\n\n"
    assert [m.content for m in export.messages] == ["Why?", f"{mark}First", f"{mark}Second", "And?"]
    assert [m.parent for m in export.messages] == [None, 0, 0, 2]
    assert export.left_out == {"tool calls": 1, "pieces of thinking": 1}


def test_markup_is_found_in_linear_time() -> None:
    """Each of these makes a search for an end that fails at every place of the text."""
    for bad in (
        "<details ",
        '<details type="x">',
        "\ue200",
        "`a``b",
        "【",
        "<tool_call>\n",
        ":::a{",
        "</think>\nabc\n",
    ):
        export = one(
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": bad * 10_000}]
        )
        assert export.messages


# files


def archive(**files: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as made:
        for name, content in files.items():
            made.writestr(name.replace("__", "/").replace("_", "."), content)
    return packed.getvalue()


def lines(*values: Any) -> bytes:
    return "\n\n".join(json.dumps(value, ensure_ascii=False) for value in values).encode()


CHAT = [{"role": "user", "content": "Hi\u2028there"}]
SESSION = (
    {"harness": "llama", "type": "session", "id": "c", "name": "One", "currNode": "b"},
    {"type": "message", "message": {"id": "b", "parent": None, "role": "user", "content": "Hi"}},
)


@pytest.mark.parametrize(
    ("content", "titles"),
    [
        (lines({"messages": CHAT, "title": "a"}, {"messages": CHAT, "title": "b"}), ["a", "b"]),
        (lines(*CHAT, *CHAT), ["Hi there"]),
        (lines(*SESSION, *SESSION), ["One", "One"]),
        (lines(SESSION[0] | {"x": 1}, SESSION[1]).removesuffix(b"\n"), ["One"]),
        (lines({"conversations": [chatgpt(node("a", "root", "user", "Hi"))]}), ["title"]),
        (archive(conversations_json=lines([SAMPLES["ChatGPT"]]), user_json=b"{}"), ["title"]),
        (
            archive(
                **{
                    "x__conversations-000_json": lines([chatgpt(node("a", "root", "user", "1"))]),
                    "x__conversations-001_json": b"[",
                    "x__conversations-002_json": lines([SAMPLES["ChatGPT"]]),
                    "__MACOSX__x__._conversations_json": b"\0",
                }
            ),
            ["title", "title"],
        ),
        (archive(a_jsonl=lines(*SESSION), b_jsonl=lines(*SESSION)), ["One", "One"]),
        (archive(**{"_/a_jsonl": lines(*SESSION)}), ["One"]),
    ],
)
def test_json_lines_and_archives_are_read(content: bytes, titles: list[str]) -> None:
    found = imports.read_file(content, 99)
    assert [export.title for export in found.conversations] == titles
    broken = b"001" in content
    assert any("could not be read" in notice for notice in found.notices) == broken


def test_a_broken_line_is_counted() -> None:
    content = lines({"messages": CHAT}, {"messages": CHAT}) + b'\n{"messages": [{"ro'
    found = imports.read_file(content, 99)
    assert len(found.conversations) == 2
    assert "1 of 3" in found.notices[0] and "Line 4" in found.notices[0]


def flags(content: bytes, bit: int) -> bytes:
    """An archive whose files say that they have a password."""
    return content.replace(b"PK\1\2\x14\3\x14\0\0", b"PK\1\2\x14\3\x14\0" + bytes([bit]))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (archive(chat_html=b"<p>"), "holds no JSON file"),
        (archive(a_json=b"{}")[:40], "archive is damaged"),
        (flags(archive(a_json=b"{}"), 1), "cannot be unpacked here.*password"),
        (archive(a_json=b"[" + b" " * 4000 + b"]"), "unpacks to more than"),
        (archive(a_json=b"["), "no readable JSON"),
    ],
)
def test_an_archive_that_cannot_be_read_is_refused(
    content: bytes, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "MAX_UNPACKED", 3000)
    with pytest.raises(StorageError, match=expected):
        imports.read_file(content, 9)


# random damage


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All containers of a value, with the keys in them."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def damage(message: Any, dice: random.Random) -> None:
    """One change to a message: a part is lost, odd, wrapped or of another kind."""
    holder, key = dice.choice([*places(message)])
    match dice.randrange(6):
        case 0:
            del holder[key]
        case 1:
            holder[key] = dice.choice(ODD)
        case 2:
            holder[key] = [holder[key]]
        case 3:
            holder[key] = {
                "type": dice.choice(("text", "image", "tool_use", "odd")),
                "text": holder[key],
            }
        case 4:
            message[dice.choice(("role", "recipient", "channel", "content_type"))] = "tool"
        case 5:
            holder[key] = None


@pytest.mark.soak(stay=2)
@pytest.mark.parametrize("hundred", range(20))
def test_each_turn_of_a_damaged_export_is_imported_or_counted(hundred: int) -> None:
    for seed in range(100 * hundred, 100 * hundred + 100):
        dice = random.Random(seed)
        name = dice.choice([*SAMPLES])
        value = copy.deepcopy(SAMPLES[name])
        for _ in range(dice.randint(1, 3)):
            message = dice.choice(messages_of(name, value))
            if isinstance(message, dict) and message:
                damage(message, dice)
        whole = read_or_none(value)
        if whole is not None:
            text = "\n".join(contents(whole))
            shown = filter(words, messages_of(name, value))
            missing = [each for each in shown if not any(word in text for word in words(each))]
            assert sum(whole.left_out.values()) >= len(missing), seed
        for message in messages_of(name, value):
            found = read_or_none(alone(name, message))
            if found is not None and not found.left_out:
                text = "\n".join(contents(found))
                assert all(word in text for word in words(message)), (seed, message)


def words(message: Any) -> list[str]:
    return WORD.findall(json.dumps(message))


def read_or_none(value: Any) -> Export | None:
    """None for an export that is refused."""
    try:
        return one([value])
    except StorageError:
        return None
