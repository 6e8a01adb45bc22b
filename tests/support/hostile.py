"""Texts that try to run scripts (each would call `fired`), or to have something fetched."""

MARKUP = (
    "<script>fired()</script>",
    "<ScRiPt>fired()</sCrIpT>",
    "<script src='data:text/javascript,fired()'></script>",
    "<script type=module>fired()</script>",
    "<scr<script>ipt>fired()</scr</script>ipt>",
    "</script><script>fired()</script>",
    "</textarea><script>fired()</script>",
    "</title><script>fired()</script>",
    "</style><script>fired()</script>",
    "</span></div></div><script>fired()</script>",
    "<!--><script>fired()</script>-->",
    "<![CDATA[<script>fired()</script>]]>",
    "<noscript><p title='</noscript><img src=x onerror=fired()>'>",
    "<img src=x onerror=fired()>",
    "<IMG SRC=x OnErRoR=fired()>",
    "<img src=x onerror=&#102;&#105;&#114;&#101;&#100;&#40;&#41;>",
    "<img/src='x'/onerror='fired()'>",
    "<img src=x\tonerror\n=\nfired()>",
    "<img src='x' onerror='fired()' <b>",
    "<<img src=x onerror=fired()>>",
    "<svg onload=fired()>",
    "<svg/onload=fired()//",
    "<svg><script>fired()</script></svg>",
    "<svg><animate onbegin=fired() attributeName=x dur=1s>",
    "<svg><a xlink:href='javascript:fired()'><text y=20>x</text></a></svg>",
    "<svg><style><img src=x onerror=fired()></style></svg>",
    "<math><mtext><table><mglyph><style><img src=x onerror=fired()>",
    "<math><maction actiontype='statusline' xlink:href='javascript:fired()'>x",
    "<iframe srcdoc='<script>parent.fired()</script>'></iframe>",
    "<iframe src='javascript:parent.fired()'></iframe>",
    "<object data='javascript:fired()'></object>",
    "<embed src='javascript:fired()'>",
    "<body onload=fired()>",
    "<video><source onerror=fired()></video>",
    "<audio src=x onerror=fired()>",
    "<details open ontoggle=fired()>x</details>",
    "<input autofocus onfocus=fired()>",
    "<select autofocus onfocus=fired()></select>",
    "<marquee onstart=fired()>x</marquee>",
    "<div style='animation:spin 1s' onanimationstart=fired()>x</div>",
    "<p style='width:expression(fired())'>x</p>",
    "<a href='javascript:fired()' autofocus onfocus=fired()>x</a>",
    "<form action='javascript:fired()'><button autofocus onfocus=fired()>x</button></form>",
    "<custom-part onclick=fired() tabindex=1 autofocus onfocus=fired()>x</custom-part>",
    "<template shadowrootmode=open><img src=x onerror=fired()></template>",
    "<base href='javascript:fired()//'>",
    "<meta http-equiv=refresh content='0;url=javascript:fired()'>",
    "<link rel=stylesheet href='javascript:fired()' onerror=fired()>",
)
WRITING = (
    "![x](x \"' onerror=fired() x='\")",
    "![x](javascript:fired())",
    "[x](javascript:fired())",
    "<javascript:fired()>",
    '[x]: javascript:fired() "x"\n\n[x]',
    "```html\n<img src=x onerror=fired()>\n```",
    "`<img src=x onerror=fired()>`",
    "$$\\href{javascript:fired()}{x}$$",
    "\\(\\htmlData{x=<img src=x onerror=fired()>}{x}\\)",
    "${fired()}",
    "{{constructor.constructor('fired()')()}}",
    "{@html '<img src=x onerror=fired()>'}",
    "\x00\u202e<img src=x onerror=fired()>\u2028",
)
PAYLOADS = MARKUP + WRITING


def references(there: str) -> list[str]:
    """Texts that ask for something from another server, each under a path of its own."""
    host = there.removeprefix("http:")
    encoded = there.replace(":", "%3a").replace("/", "%2f")
    forms = (
        "![x]({there}/{n})",
        "![x]({host}/{n})",
        "![x](/gradio_api/file={there}/{n})",
        "![x](/gradio_api/file={encoded}%2f{n})",
        "![x](/gradio_api/%66ile={there}/{n})",
        "![x](/gradio_api/proxy={there}/{n})",
        "![x](/gradio_api/file/{there}/{n})",
        "![x][r]\n\n[r]: {there}/{n}",
        "![x](/logout)",
        "<img src='{there}/{n}'>",
        "<img srcset='{there}/{n} 2x'>",
        "<video poster='{there}/{n}' src='{there}/{n}' autoplay></video>",
        "<audio autoplay><source src='{there}/{n}'></audio>",
        "<iframe src='{there}/{n}'></iframe>",
        "<object data='{there}/{n}'></object>",
        "<embed src='{there}/{n}'>",
        "<link rel=stylesheet href='{there}/{n}'><link rel=prefetch href='{there}/{n}'>",
        "<style>@import '{there}/{n}'; body {{ background: url({there}/{n}) }}</style>",
        "<p style='background-image: url({there}/{n})'>x</p>",
        "<svg><image href='{there}/{n}'/><use href='{there}/{n}#x'/></svg>",
        "<meta http-equiv=refresh content='0;url={there}/{n}'>",
        "<form action='{there}/{n}'><input type=image src='{there}/{n}'></form>",
        "$$\\includegraphics{{{there}/{n}}}$$",
        "<a href='{there}/{n}' ping='{there}/{n}'>x</a>",
    )
    return [
        form.format(there=there, host=host, encoded=encoded, n=number)
        for number, form in enumerate(forms)
    ]


LONG = 20_000
"""Characters of a message that repeats something."""
FORMULAS = {
    "fraction": (r"\frac{1}{", "}"),
    "numerator": (r"\frac{", "}{2}"),
    "exponent": ("x^{", "}"),
    "index": ("x_{", "}"),
    "both": ("x_a^{", "}"),
    "root": (r"\sqrt{", "}"),
    "cube root": (r"\sqrt[3]{", "}"),
    "degree": (r"\sqrt[", "]{x}"),
    "group": ("{", "}"),
    "parenthesis": (r"\left(", r"\right)"),
    "matrix": (r"\begin{matrix}", r"\end{matrix}"),
    "cases": (r"\begin{cases}", r"\end{cases}"),
    "text": (r"\text{", "}"),
    "hat": (r"\hat{", "}"),
    "overline": (r"\overline{", "}"),
    "brace": (r"\underbrace{", "}"),
    "box": (r"\boxed{", "}"),
    "phantom": (r"\phantom{", "}"),
    "binomial": (r"\binom{", "}{2}"),
    "over": (r"{a \over ", "}"),
    "stack": (r"\stackrel{a}{", "}"),
    "choice": (r"\mathchoice{", "}{a}{b}{c}"),
    "substack": (r"\substack{", "}"),
    "colour": (r"\color{red} ", ""),
    "size": (r"\large ", ""),
    "style": (r"\displaystyle ", ""),
    "font": (r"\mathbf ", ""),
    "accent": (r"\vec ", ""),
    "bare fraction": (r"\frac1", ""),
    "bare root": (r"\sqrt", ""),
    "bare exponent": ("x^", ""),
}
"""What formulas nest in each other, as the part before and the one after what is inside."""
DEFINED = {
    "long": r"\def\a{" + "x" * 7000 + "}" + r"\a" * 290,
    "deep": r"\def\a#1{" + r"\frac{1}{" * 20 + "#1" + "}" * 21 + r"\a{" * 20 + "x" + "}" * 20,
    "doubled": r"\def\a#1{#1#1}" + r"\a{" * 20 + "x" * 5000 + "}" * 20,
    "new": r"\newcommand{\a}[1]{\sqrt{\sqrt{\sqrt{#1}}}}" + r"\a{" * 40 + "x" + "}" * 40,
    "cells": r"\begin{matrix}" + "&" * 7900 + r"\end{matrix}",
    "rows": r"\begin{matrix}" + r"\\" * 3900 + r"\end{matrix}",
    "grid": r"\begin{matrix}" + "&" * 3900 + r"\\" * 1900 + r"\end{matrix}",
    "columns": r"\begin{array}{" + "|c" * 1900 + "}" + "a&" * 1500 + r"\end{array}",
    "fractions": r"\frac12" * 1100,
    "sums": r"\sum_a^b " * 850,
    "primes": "x" + "'" * 7000,
    "negations": r"\not " * 290 + "x",
}
"""Formulas that are small and become large."""
BLOCKS = ("- ", "> ", "1. ", "- > ", "> - ", "* + - ", "- [ ] ", "> 1. ", ">", "\t")
INLINE = (
    "**a *b ", "*a_ ", "*a **b ", "_a*b_", "~~a ", "`a``", "[", "[a](", "![", "[a](b) ", "![](b) ",
    "<http://a", "<a@", "<a@b.c> ", "&amp;", "&", "\\", "\\(a ", "$a ", "$a$ ", "$$a ",
    "$\\frac12$ ", "\\[a", "|a", "a|-", "<b>", "<!--", "\u0301", "\u202e", "\U0001f469\u200d",
    "a\u00ad", "\u200b", "<think>", "</think>", "]](", "***", "a*", "_",
)  # fmt: skip
CODE = {
    "markdown": ("[a](", "a<b>"), "csharp": ("async ", "a b "), "cpp": ("(", "a"),
    "java": ("/a", "$a"), "javascript": ("((", "/a"), "css": ("/a", "`a"), "php": ("A",),
    "bash": ('"""', "a"), "ini": ("a_", "--"), "python": ("x = '", "f'{"), "xml": ("<a ", "<!--"),
    "typescript": ("a<", "()=>"), "c": ("x = '", "_a"), "sql": ("(", "'"), "r": ("(",),
    "graphql": ("_a",), "perl": ("/a", "$a"), "ruby": ("#{", "/a"), "rust": ("'a", "r#"),
    "yaml": ("- ", "{a: "), "json": ("[", '{"a":'), "latex": ("\\a{", "$a"), "diff": ("+a\n",),
}  # fmt: skip
"""Languages, and what is slow to highlight in them."""


def heavy() -> dict[str, str]:
    """Messages of at most some ten thousand characters that would hold up or end a page which
    formats them without a limit, by what they consist of."""
    found: dict[str, str] = {}
    for name, (before, after) in FORMULAS.items():
        for depth in (150, 400):
            inside = before * depth + "x" + after * depth
            found[f"maths: {name}, {depth} deep"] = f"$$\n{inside}\n$$"
    found |= {f"maths: {name}": f"$$\n{tex}\n$$" for name, tex in DEFINED.items()}
    found["maths: many"] = "$\\sqrt{\\frac{a}{b}}$ and " * 1000
    found["maths: deep in a list"] = "> - " * 9 + "$" + r"\sqrt{" * 50 + "x" + "}" * 50 + "$"
    for unit in BLOCKS:
        found[f"blocks: {unit!r} in a line"] = unit * 2000 + "x"
        stairs = (" " * level + unit + "x" for level in range(300))
        found[f"blocks: {unit!r} as stairs"] = "\n".join(stairs)
        found[f"blocks: {unit!r} in every line"] = "\n".join(unit * n + "x" for n in range(1, 100))
    for unit in INLINE:
        found[f"inline: {unit!r}"] = (unit * LONG)[:LONG]
        found[f"inline: {unit!r} in every line"] = (unit + "\n") * (LONG // (len(unit) + 1))
    for language, units in CODE.items():
        for unit in units:
            found[f"code: {language}, {unit!r}"] = f"```{language}\n{(unit * LONG)[: LONG - 20]}"
    found |= {
        "inline: closed emphasis": "**a *b " * 3000 + "c* d**" * 3000,
        "inline: nested links": "[a" * 3000 + "](b)" * 3000,
        "inline: line breaks": "\n" * 200_000,
        "inline: spaces": " \n" * 60_000 + "x",
        "inline: one word": "a" * 150_000,
        "blocks: table": "|a|b|\n|-|-|\n" + "|a|b|\n" * 8000,
        "blocks: wide table": "|a" * 500 + "\n" + "|-" * 500 + "\n" + ("|a" * 500 + "\n") * 40,
        "blocks: headings": "# a\n" * 8000,
        "blocks: rules": "---\n\n" * 8000,
        "blocks: fences": "```\n```\n" * 5000,
        "blocks: languages": "```js\nlet a = 1;\n```\n" * 1500,
        "blocks: list": "- a\n" * 8000,
        "blocks: loose list": "- a\n\n" * 6000,
    }
    return found
