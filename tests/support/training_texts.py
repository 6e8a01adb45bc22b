"""Texts to train on, made up by rules: small enough for a test, regular enough to be learned."""

import json
import lzma
from pathlib import Path
from random import Random

COLOURS = ("red", "green", "blue", "yellow", "black", "white")
THINGS = ("apple", "river", "house", "cloud", "horse", "stone", "boat", "tree")


def chat(draw: Random, number: int) -> dict[str, object]:
    """A chat of one or two turns, or some prose; all begin differently."""
    thing, other = draw.sample(THINGS, 2)
    colour = draw.choice(COLOURS)
    if number % 5 == 0:
        text = f"Number {number}. The {thing} is {colour}. The {other} is beside the {thing}. "
        return {"source": "prose", "text": text * 3}
    said = [
        (f"I am person {number}. What is the {thing} like?", f"The {thing} is {colour}."),
        (f"And where is the {other}?", f"The {other} is beside the {thing}."),
    ]
    messages = []
    for question, answer in said[: 1 + number % 2]:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    return {"source": "things", "messages": messages}


def write_texts(path: Path, count: int) -> Path:
    draw = Random(0)
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        for number in range(count):
            file.write(json.dumps(chat(draw, number)) + "\n")
    return path
