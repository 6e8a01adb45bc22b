"""An answer as Markdown: every character keeps the colour of its token, however it grew, and
nothing in it runs, hangs or is lost."""

import json
import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from engine.thinking import MARKS, Marks
from engine.types import CONTEXT, MODEL, STATISTICS, TARGET
from storage.conversations import Piece
from tests.conftest import ROOT
from tests.support.hostile import PAYLOADS, references
from tests.support.message_view import cut, draw, grouped, message_view, words

pytestmark = pytest.mark.browser
SOURCES = (CONTEXT, TARGET, MODEL, STATISTICS, CONTEXT, TARGET, TARGET)
NASTY = (ROOT / "tests" / "support" / "nasty_markdown.txt").read_text(encoding="utf-8")
HIDDEN = {"https", "example", "org", "wherever", "somewhere", "potsdam", "png", "python"}
"""Words of the sample that are addresses or names of languages, and are not shown as text."""
SPANS = """() => [...document.querySelectorAll(".answered .tok")]
  .filter((node) => !node.closest(".maths"))
  .map((node) => [node.textContent, node.source])"""


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    with message_view(browser) as opened:
        yield opened


@pytest.mark.soak(stay=2)
@pytest.mark.parametrize("lengths", [(1,), (2, 3, 1, 5), (7, 4, 9), (40,)])
def test_every_character_has_the_colour_of_its_token(page: Page, lengths: tuple[int, ...]) -> None:
    """Each word stands once in the sample, so the sources of its characters can be looked up there,
    whatever stands around it."""
    pieces = cut(NASTY, lengths, SOURCES)
    draw(page, pieces)
    sources = [piece.source for piece in pieces for _ in piece.text]
    shown = [(letter, source) for text, source in page.evaluate(SPANS) for letter in text]
    text = "".join(character for character, _ in shown)
    wanted = [word for word in words(NASTY) if word not in HIDDEN and NASTY.count(word) == 1]
    assert len(wanted) > 80
    for word in wanted:
        place, at = text.index(word), NASTY.index(word)
        drawn = [source for _, source in shown[place : place + len(word)]]
        assert drawn == sources[at : at + len(word)], word


def test_what_is_formatted_is_what_markdown_means(page: Page) -> None:
    draw(page, cut(NASTY, (3,), SOURCES))
    prose = page.locator(".formatted")
    for selector, text in {
        "h3.h1": "Alpha bravo charlie",
        "h4.h2": "Caesar dora",
        "p > strong": "echo foxtrot",
        "s": "india",
        "p > code": "juliet kilo",
        "ul > li > ol > li > blockquote strong": "otto",
        "blockquote blockquote code": "schule",
        "th.center": "wilhelm|xanthippe",
        "td.right code": "aachen",
        "li .code .hljs-keyword": "const",
    }.items():
        expect(prose.locator(selector).first).to_have_text(text)
    assert prose.locator("img").count() == 0
    links = prose.locator("a").evaluate_all(
        "all => all.map((a) => [a.textContent, a.rel, a.target])"
    )
    assert [text for text, _, _ in links] == [
        "papa quebec", "offenbach", "quickborn", "https://rostock.example/stuttgart",
    ]  # fmt: skip
    assert {(rel, target) for _, rel, target in links} == {("noopener noreferrer", "_blank")}
    assert "*november*" in prose.inner_text() and "<b>tuebingen</b>" in prose.inner_text()


GROW = """([groups, sources, sizes]) => {
  const run = view.newRun();
  const turn = view.begin("growing", "assistant", run);
  view.grows(turn, true);
  const tokens = [];
  let step = 0;
  for (const [number, match, steps, texts, percents] of groups) {
    step += steps;
    texts.forEach((text, i) => tokens.push([number, match, step, text, percents[i]]));
  }
  const fresh = () => {
    const other = view.begin("fresh", "assistant", run);
    view.grows(other, true);
    view.show(other);
    const drawn = other.box.innerHTML;
    view.drawn().pop();
    other.frame.remove();
    return drawn;
  };
  const wrong = [];
  let kept = 0;
  let before = 0;
  for (let at = 0; at < tokens.length;) {
    const some = tokens.slice(at, at + sizes[at % sizes.length]);
    for (const [number, match, step, text, percent] of some) {
      const group = [number, match, step - before, [text], [percent]];
      view.take(run, [group], run.texts.length, sources);
      before = step;
    }
    at += some.length;
    const first = turn.page && turn.page.box.firstChild;
    view.show(turn);
    kept += first === turn.page.box.firstChild ? 1 : 0;
    if (turn.box.innerHTML !== fresh()) wrong.push(run.text);
  }
  view.grows(turn, false);
  view.show(turn);
  return [wrong, kept, turn.page.at];
}"""


@pytest.mark.soak(stay=1)
@pytest.mark.parametrize("sizes", [[1], [5, 1, 3], [29]])
def test_a_growing_answer_is_at_any_time_what_it_is_when_drawn_at_once(
    page: Page, sizes: list[int]
) -> None:
    draw(page)
    groups, sources = grouped(cut(NASTY, (2, 3, 1, 5), SOURCES))
    wrong, kept, at = page.evaluate(GROW, [groups, sources, sizes])
    assert wrong == []
    assert kept > 10 * len(sizes) and at > len(NASTY) / 2, "what is final is not drawn again"


MATHS: tuple[tuple[str, list[str]], ...] = (
    ("so $x^2$ is", ["x^2"]),
    ("so $$x^2$$ is", ["x^2"]),
    (r"so \(a\) and \[b\] are", ["a", "b"]),
    ("$$\n\\frac{1}{2}\n$$", ["\n\\frac{1}{2}\n"]),
    ("\\[\nx_1\n\\]\nand on", ["\nx_1\n"]),
    ("> $$\n> y\n> $$", ["\ny\n"]),
    ("| a |\n|---|\n| $z$ |", ["z"]),
    ("**$n$-th** and ($k$)", ["n", "k"]),
    ("from $5 to $10", []),
    ("$5, $10 and $20", []),
    ("it costs $5 or 10$ there", []),
    ("US$5 and US$6", []),
    ("$5-$10", []),
    ("`$x$` and \\$x\\$", []),
    ("$ x $ and $x $", []),
    ("an $open one", []),
    ("函数$f(x)$的值，当$x=1$时", ["f(x)", "x=1"]),
    ("함수 $f$와 값$y$는", ["f", "y"]),
    ("a\n\\begin{align*}\nx\n\\end{align*}\nb", ["\\begin{align*}\nx\n\\end{align*}"]),
    ("\\begin{equation}x\\end{equation}", [r"\begin{equation}x\end{equation}"]),
    ("\\begin{align}\nopen", []),
    ("so \\begin{align} is written", []),
    ("$$\nopen\n\nand no maths", []),
)


def test_dollars_are_maths_only_where_maths_is_meant(page: Page) -> None:
    for text, formulas in MATHS:
        draw(page, cut(text, (3,), SOURCES))
        found = page.locator(".formatted .maths")
        plans = found.evaluate_all("all => all.map((node) => node.plan.tex)")
        assert [tex.strip() for tex in plans] == [tex.strip() for tex in formulas], text
        assert found.locator(".katex").count() == len(formulas), text
    # What is no formula is shown as it is written.
    draw(page, cut(r"So $\frac{1}{$ and $\nosuch{a}$ end.", (2,), SOURCES))
    expect(page.locator(".formatted .maths code")).to_have_count(2)
    expect(page.locator(".formatted")).to_contain_text(r"\frac{1}{")


BOLD = (
    (
        "我们需要**“备份并恢复”步骤**。**请先保存文件。**然后再继续。",
        ["“备份并恢复”步骤", "请先保存文件。"],
    ),
    ("他写了**「结论」**两字。**上海（Shanghai）**是城市。", ["「结论」", "上海（Shanghai）"]),
    ("**保存してください（推奨）。**次に再起動します。", ["保存してください（推奨）。"]),
    ('그녀는 **"좋다"**라고 했다. **서울(도시)**은 넓다.', ['"좋다"', "서울(도시)"]),
    ("패키지를 **`npm publish`**를", ["npm publish"]),
    ("1. **提示：**先关闭程序。\n2. **重要** 有空格。", ["提示：", "重要"]),
    ("这是**🎉活动！**快来", ["🎉活动！"]),
    ("**𠮷野（よしの）**さん", ["𠮷野（よしの）"]),
    ("| 名 | 值 |\n|---|---|\n| **（甲）**乙 | **1.** |", ["（甲）", "1."]),
    ("**Note:**text and **more**, see:**bold** text", ["Note:", "more", "bold"]),
    ("2**-1 and **open, 乘**法", ["open, 乘"]),
    ("2**-1 和 3**-2", []),
    ("他说 ** 空格 ** 没有", []),
    ("a ** b** c", []),
    ("Call f(**a), g(**b) or {**c}.", []),
)


def test_bold_text_is_bold_next_to_punctuation_of_any_script(page: Page) -> None:
    for text, bold in BOLD:
        for lengths in ((100,), (1,)):
            draw(page, cut(text, lengths, SOURCES))
            found = page.locator(".formatted strong").all_text_contents()
            assert found == bold, text
    draw(page, cut("~~旧（已废弃）。~~新*斜（体）。*正", (2,), SOURCES))
    expect(page.locator(".formatted s")).to_have_text("旧（已废弃）。")
    expect(page.locator(".formatted em")).to_have_text("斜（体）。")


def test_a_line_break_is_the_only_html_that_is_read(page: Page) -> None:
    draw(page, cut("| a |\n|---|\n| one<br>two<BR />three `<br>` <b>x</b> |", (3,), SOURCES))
    cell = page.locator(".formatted td")
    expect(cell.locator("br")).to_have_count(2)
    expect(cell).to_have_text("onetwothree <br> <b>x</b>")


def thought(page: Page) -> Any:
    return page.locator(".answered details.thought")


@pytest.mark.soak(stay=1)
@pytest.mark.parametrize("opening", ["<think>\n", "<thinking>", "\n<think>", ""])
def test_thinking_is_folded_counted_apart_and_not_copied(page: Page, opening: str) -> None:
    """Also where the template has opened it, and only its end is written."""
    closing = "\n</thinking>\n\n" if opening == "<thinking>" else "\n</think>\n\n"
    inside, said = "Let me *count* up.", "It is **four**."
    parts = [part for part in (opening, *re.findall(r"\w+|\W+", inside), closing, "It is ") if part]
    pieces = [Piece(part, MODEL, 1, n, n, 0.5) for n, part in enumerate([*parts, "**four**."])]
    draw(page, pieces, begun=not opening)
    text = "".join(piece.text for piece in pieces)
    summary = thought(page).locator("summary")
    tokens = len(re.findall(r"\w+|\W+", inside)) + 1  # The mark that ends it has a line break.
    expect(summary).to_have_text(re.compile(rf"Thought for {tokens} tokens"))
    expect(page.locator(".answered > .formatted")).to_have_text("It is four.")
    expect(page.locator(".counted")).to_have_text(f"2 tokens, and {tokens} of thinking")
    expect(thought(page).locator(".formatted")).to_be_hidden()
    summary.click()
    expect(thought(page).locator("em")).to_have_text("count")
    assert page.evaluate("view.answerOf(view.drawn()[0])") == said
    assert page.evaluate("view.drawn()[0].box.raw()") == text
    page.locator("[data-view=tokens]").click()
    assert page.locator(".answered").text_content() == text, "every token is in the other view"
    page.locator("[data-view=formatted]").click()


@pytest.mark.soak
def test_thinking_is_seen_while_it_continues(page: Page) -> None:
    draw(page)
    grow = """([text, from]) => {
      const run = view.newRun();
      view.take(run, [[0, 0, 0, text.match(/.{1,4}/gs), text.match(/.{1,4}/gs)]], 0, ["context"]);
      const turn = view.begin("growing", "assistant", run);
      view.grows(turn, true);
      view.tell(turn, { thought: [from, null, null] });
      view.show(turn);
    }"""
    page.evaluate(grow, ["The template began it", 0])
    expect(thought(page).locator("summary")).to_have_text(re.compile(r"Thinking … \d+ tokens"))
    page.evaluate("view.drawn().pop().frame.remove()")
    page.evaluate(grow, ["<think>\nThis takes some time", len("<think>")])
    expect(thought(page).locator("summary")).to_have_text(re.compile(r"Thinking … \d+ tokens"))
    thought(page).locator("summary").click()
    expect(thought(page).locator(".formatted")).to_have_text("This takes some time")


SHOWN = (
    "What `</think>` ends is no thinking here.",
    "It writes like this:\n\n```\n<think>\nHm.\n</think>\nHello!\n```\n\nThe client hides it.",
    "Put your thoughts between `<think>` and\n</think>\nand then answer.",
    "First\n[THINK]\nx\n[/THINK]\n\nand <|channel>thought\ny<channel|>",
)


def test_an_answer_that_shows_the_marks_of_thinking_is_an_answer(page: Page) -> None:
    for text in SHOWN:
        draw(page, cut(text, (4,), SOURCES))
        expect(thought(page)).to_have_count(0)
        assert page.evaluate("view.answerOf(view.drawn()[0])") == text


@pytest.mark.parametrize("marks", [MARKS[n] for n in (4, 5, 6, 7)], ids=lambda marks: marks.begin)
def test_thinking_is_folded_whatever_its_marks_are(page: Page, marks: Marks) -> None:
    text = f"{marks.begin}\nHm 😀.\n{marks.ends[0]}\n\nYes 😀."
    draw(page, cut(text, (4,), SOURCES))
    expect(thought(page)).to_have_count(1)
    expect(page.locator(".answered > .formatted")).to_have_text("Yes 😀.")
    assert page.evaluate("view.answerOf(view.drawn()[0])") == "Yes 😀."
    # Thinking that was switched off leaves its marks and nothing between them.
    draw(page, cut(f"{marks.begin}\n\n{marks.ends[0]}\n\nYes.", (4,), SOURCES))
    expect(thought(page)).to_have_count(0)
    expect(page.locator(".answered > .formatted")).to_have_text("Yes.")


TREE = """
{"b": 12345678901234567890.10, "2": [], "a": {"*x*": [null, true, "l1\\n\\u00e9 \\"q\\" <b>"]},
 "a": "again"}"""


def test_an_answer_in_json_has_a_tree_below_its_text(page: Page) -> None:
    """Keys in their order and twice, all digits; its text keeps its colours, and is no Markdown."""
    draw(page, cut(TREE, (3,), SOURCES), json=True)
    tree, text = page.locator(".tree"), page.locator(".answered > .formatted")
    assert text.text_content() == TREE and text.locator("em").count() == 0
    assert "".join(part for part, _ in page.evaluate(SPANS)) == TREE
    expect(tree).to_have_text("Tree4 fields")
    tree.locator("summary").click()
    first = tree.locator("> ul > li")
    expect(first).to_have_text(["b12345678901234567890.10", "20 items", "a1 field", "aagain"])
    expect(tree.locator("b")).to_have_count(0)
    first.nth(2).locator("summary").first.click()
    tree.locator("summary", has_text="*x*").click()
    leaves = tree.locator("ul ul ul li")
    expect(leaves).to_have_count(3)  # it is drawn when it has been opened
    assert leaves.all_text_contents() == ["0null", "1true", '2l1\né "q" <b>']
    expect(leaves.locator(".text")).to_have_count(1)
    page.evaluate("view.redraw()")
    expect(leaves).to_have_count(3)
    page.locator("[data-view=tokens]").click()
    expect(tree).to_have_count(0)
    page.locator("[data-view=formatted]").click()
    expect(tree.locator("ul")).to_have_count(0)
    draw(page, cut("[" + "1," * 700 + "2]", (9,), SOURCES), json=True)
    tree.locator("summary").click()
    expect(tree.locator("li").last).to_have_text("… and 201 more, which stand in the text")
    texts = [*PAYLOADS, "constructor", "__proto__"]
    draw(page, cut(json.dumps({text: {text: text} for text in texts}), (3,), SOURCES), json=True)
    tree.locator("summary").click()
    inner = tree.locator("ul summary")
    expect(inner).to_have_count(len(texts))
    inner.evaluate_all("all => all.forEach((summary) => summary.click())")
    expect(tree.locator("ul ul li")).to_have_count(len(texts))
    assert tree.locator("ul ul li").all_text_contents() == [text * 2 for text in texts]
    assert tree.locator(":not(summary, span, ul, li, details)").count() == 0


@pytest.mark.parametrize("text", ['{"a": [1, 2', '"text"', "12", "", "[" * 100_000])
def test_what_is_no_whole_object_or_list_has_no_tree(page: Page, text: str) -> None:
    draw(page, cut(text, (4000,), SOURCES), json=True)
    expect(page.locator(".tree")).to_have_count(0)
    deep = "[" * 20_000 + "]" * 20_000
    draw(page, cut(deep, (4000,), SOURCES), json=True)
    assert page.evaluate("view.drawn()[0].box.raw()") == deep
    draw(page, cut('{"a": 1}', (2,), SOURCES))
    expect(page.locator(".tree")).to_have_count(0)


SLOW = (
    "[" * 20_000,
    "[a](" * 5000,
    ">" * 20_000 + " x",
    "- " * 5000 + "x",
    "\n".join(" " * n + "- x" for n in range(500)),
    "*" * 20_000 + "a" + "*" * 20_000,
    "*a **b " * 3000,
    "`" * 9999 + " " + "".join("`" * n + " " for n in range(200)),
    "$a " * 7000,
    r"\(a " * 5000,
    "![" * 10_000,
    "<a@" * 7000,
    "$$\n" + "{" * 5000 + "\n$$",
    r"$$\def\a{\a\a}\a$$",
    "|a" * 500 + "\n" + "|-" * 500 + "\n" + ("|a" * 500 + "\n") * 20,
    "```js\n" + "/a" * 8000,
    "```python\n" + "x = '" * 4000,
    "<think>" * 2000,
)


def test_no_markdown_hangs_the_page_or_loses_its_words(page: Page) -> None:
    for text in SLOW:
        draw(page, cut(text, (400,), SOURCES))
        start = text[:20]
        assert page.evaluate("view.drawn()[0].box.raw()") == text, start
        assert page.evaluate("document.querySelectorAll('.answered *').length") < 60_000, start
        last = re.findall(r"[a-z]", text)[-1:]
        assert not last or last[0] in (page.locator(".answered").text_content() or ""), start


def test_hostile_markdown_is_inert(page: Page) -> None:
    hostile = [*PAYLOADS, *references("http://198.51.100.7")]
    for text in (*hostile, "\n\n".join(hostile)):
        draw(page, cut(text, (3,), SOURCES))
        risky = ":is(script, iframe, object, embed, img, video, audio, form, input, style, link)"
        assert page.locator(f".answered {risky}").count() == 0
        assert page.locator(".answered :is([onerror], [onload], [onfocus], [onclick])").count() == 0
        links = page.locator(".answered a").evaluate_all("all => all.map((a) => a.href)")
        assert all(re.match(r"(https?://|mailto:)", link) for link in links), links


@pytest.mark.soak
def test_hover_and_arrows_tell_of_every_token_of_a_formatted_answer(page: Page) -> None:
    text = "**One** two `three` four\n\n- five"
    pieces = cut(text, (3,), (CONTEXT, TARGET))
    draw(page, pieces)
    ends = [*accumulate(len(piece.text) for piece in pieces)]
    page.locator(".tok", has_text="ree").hover()
    position = 1 + next(n for n, end in enumerate(ends) if end > text.index("ree"))
    expect(page.locator(".inspector")).to_contain_text(f"position {position}")
    page.locator(".answered").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".inspector")).to_contain_text("position 1")
    page.keyboard.press("End")
    expect(page.locator(".inspector")).to_contain_text(f"position {len(pieces)}")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".tok.at")).to_have_count(1)


@pytest.mark.soak
def test_the_legend_counts_and_dims_and_colours_can_be_switched_off(page: Page) -> None:
    chips = page.locator(".legend .chip:visible")
    draw(page)
    expect(chips).to_have_count(0)
    expect(page.locator(".legend .whole")).to_be_hidden()
    draw(
        page, cut("x" * 8, (1,), (CONTEXT, TARGET, TARGET, TARGET, CONTEXT, TARGET, MODEL, TARGET))
    )
    expect(chips).to_have_text(["This chat25 %", "Past answers13 %", "The model itself63 %"])
    expect(page.locator(".legend .whole")).to_have_text("This conversation")
    text = "Some *words* of `both` kinds\n\n```js\nlet a = 1;\n```"
    draw(page, cut(text, (2,), (CONTEXT, MODEL)))
    tokens, chip = page.locator(".formatted .tok"), page.locator(f".chip[data-source={MODEL}]")
    chip.click()
    dimmed = page.locator(".formatted .tok.dim").evaluate_all("all => all.map((n) => n.source)")
    assert set(dimmed) == {CONTEXT} and len(dimmed) > 5
    chip.click()
    lines = "all => [...new Set(all.map((n) => getComputedStyle(n).textDecorationLine))]"
    assert tokens.evaluate_all(lines) == ["underline"]
    page.locator("[data-colours]").click()
    assert tokens.evaluate_all(lines) == ["none"]
    assert page.evaluate("JSON.parse(localStorage.getItem('strata-view')).colours") is False
    page.locator("[data-colours]").click()
