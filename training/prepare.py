"""Turns texts into packed tokens, and trains a tokenizer if none is given.

Texts are chats and prose in JSON lines, compressed with xz or not. Whether a document is held out
depends only on how it begins, so documents that begin alike are always treated alike.
"""

import argparse
import json
import lzma
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError, model_validator
from tqdm import tqdm
from typing_extensions import TypedDict

from bench.harness import Add, Command
from bench.report import table
from engine.errors import SettingError

HELD = 0.01
"""The part of the documents that no model is trained on."""
BEGINNING = 200
REGULAR = ("tldr", "open_english_wordnet", "factbook")
"""Sources whose answers are so regular that every draft is accepted."""


class Turn(TypedDict):
    role: Literal["system", "user", "assistant"]
    content: str


class Document(BaseModel, frozen=True):
    """A chat of `messages`, or a `text` of prose; `source` says where it comes from."""

    source: str
    messages: tuple[Turn, ...] = ()
    text: str = ""

    @model_validator(mode="after")
    def not_empty(self) -> Self:
        if not any(self.parts):
            raise ValueError("it has no text")
        return self

    @property
    def parts(self) -> list[str]:
        """The text without the additions of a chat template."""
        return [message["content"].strip() for message in self.messages] or [self.text]

    @property
    def size(self) -> int:
        return sum(len(part.encode()) for part in self.parts)

    @property
    def line(self) -> str:
        """The line of the file that holds this document."""
        return self.model_dump_json(exclude_defaults=True) + "\n"

    def chance(self, salt: str) -> float:
        """A number from 0 to 1 that depends only on the beginning of the document."""
        digest = sha256((salt + self.parts[0][:BEGINNING]).encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64

    @property
    def held(self) -> bool:
        """Whether the document is held out from training, for measurements."""
        return self.chance("held") < HELD


def read(paths: Iterable[Path], sample: float = 1.0) -> Iterator[Document]:
    """All documents of some files, or a part of them. Raises SettingError."""
    for path in paths:
        try:
            opener = lzma.open if path.suffix == ".xz" else open
            with opener(path, "rt", encoding="utf-8") as lines:
                for number, line in enumerate(lines, start=1):
                    document = parsed(line, path, number)
                    if document.chance("sample") < sample:
                        yield document
        except (OSError, lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
            raise SettingError(f"The texts in {str(path)!r} cannot be read: {error}.") from error


def parsed(line: str, path: Path, number: int) -> Document:
    try:
        return Document.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = " ".join([*map(str, first["loc"]), first["msg"]])
        raise SettingError(
            f"Line {number:,} of {str(path)!r} is no document ({reason}). Each must be a JSON "
            'object with "source" and either "messages", each with "role" and "content", or '
            '"text".'
        ) from error


# tokenizer and packed tokens


BEGIN, END = "<|bos|>", "<|end|>"
SPECIAL = [BEGIN, END, "<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] | trim + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TransformersTokenizer = Any
"""A tokenizer of the transformers library, which declares little of what it can do."""
BATCH = 1000
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
LARGEST = 1 << 16
"""Packed tokens have two bytes."""


class Prepare(Command):
    """Make packed tokens from texts, and the tokenizer if none is given.

    Writes OUTPUT/tokenizer, OUTPUT/train (packed tokens), and OUTPUT/held.jsonl: the documents that
    are kept from training, as text, so that models with other tokenizers are measured on them too.
    """

    def add_options(self, add: Add) -> None:
        add("texts", nargs="+", type=Path, help="JSON lines, also xz-compressed")
        add("--output", required=True, type=Path, help="a folder for tokens and tokenizer")
        add("--tokenizer", type=Path, help="take this one instead of training one")
        add("--vocabulary", type=int, default=6144, help="tokens of a tokenizer to be trained")
        add("--context", type=int, default=2048, help="positions that its models have")
        add("--sample", type=float, default=1.0, help="the part of the documents to take")

    def run(self, options: argparse.Namespace) -> None:
        if not 0 < options.sample <= 1:
            raise SettingError(f"The sample is {options.sample}. It must be above 0 and at most 1.")
        if not 300 <= options.vocabulary <= LARGEST:
            raise SettingError(
                f"The vocabulary is {options.vocabulary:,}. It must be from 300 to {LARGEST:,} "
                "tokens."
            )
        options.output.mkdir(parents=True, exist_ok=True)
        tokenizer = tokenizer_of(options, options.output / "tokenizer")
        tokens, sizes, held = Counter[str](), Counter[str](), Counter[str]()
        with (options.output / "held.jsonl").open("w", encoding="utf-8") as file:

            def learned() -> Iterator[Document]:
                for document in read(options.texts, options.sample):
                    if not document.held:
                        yield document
                        continue
                    held[document.source] += 1
                    file.write(document.line)

            def packed() -> Iterator[tuple[str, list[int]]]:
                for document, ids in tokenized(tokenizer, learned()):
                    tokens[document.source] += len(ids)
                    sizes[document.source] += document.size
                    yield document.source, ids

            pack(options.output / "train", packed())
        sources = [*sorted(tokens), "all"]
        for counts in (tokens, sizes, held):
            counts["all"] = counts.total()
        rows = (
            (name, f"{tokens[name]:,}", f"{sizes[name] / tokens[name]:.2f}", f"{held[name]:,}")
            for name in sources
        )
        table(("source", "tokens", "bytes/token", "held out"), rows)


def tokenizer_of(options: argparse.Namespace, folder: Path) -> TransformersTokenizer:
    """The given tokenizer, or one trained on these texts; its files are stored in `folder`."""
    if not options.tokenizer:
        documents = read(options.texts, options.sample)
        texts = (part for each in documents if not each.held for part in each.parts)
        tokenizer = train_tokenizer(texts, options.vocabulary, options.context)
        tokenizer.save_pretrained(folder)
        return tokenizer
    from transformers import AutoTokenizer  # late, as it takes seconds

    try:
        copy_tokenizer(options.tokenizer, folder)
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise SettingError(
            f"There is no tokenizer in {str(options.tokenizer)!r}: {error}"
        ) from error


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer byte by byte: loading and saving would change them."""
    target.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(source / name, target / name)


def train_tokenizer(texts: Iterable[str], size: int, context: int) -> TransformersTokenizer:
    """A byte-level BPE tokenizer with the chat template of the family."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tqdm(texts, desc="Tokenizer", unit=" texts"), trainer)
    wrapper: Any = PreTrainedTokenizerFast  # it declares none of these arguments
    return wrapper(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=END,
        extra_special_tokens=SPECIAL[2:],
        clean_up_tokenization_spaces=False,
        model_max_length=context,
        chat_template=TEMPLATE,
    )


def rendered(tokenizer: TransformersTokenizer, document: Document) -> str:
    if document.messages:
        text = tokenizer.apply_chat_template(list(document.messages), tokenize=False)
        return str(text)
    return str(tokenizer.bos_token) + document.text


def tokenized(
    tokenizer: TransformersTokenizer, documents: Iterable[Document]
) -> Iterator[tuple[Document, list[int]]]:
    rest = iter(tqdm(documents, desc="Tokens", unit=" documents"))
    while batch := list(islice(rest, BATCH)):
        texts = [rendered(tokenizer, document) for document in batch]
        ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        yield from zip(batch, ids, strict=True)


# packed tokens on disk


TOKENS, ENDS, SOURCES, NAMES = "tokens.bin", "ends.npy", "sources.npy", "sources.json"


@dataclass(frozen=True)
class Corpus:
    """Packed tokens: all documents of a training set one after the other, two bytes a token.

    Document i ends before `ends[i]` and comes from `names[sources[i]]`.

    A window is cut from a stream of shuffled documents, so it may hold several of them and end
    within one; each document begins with the token that begins a text. The order depends only on
    the seed and the epoch, so training that was interrupted continues with the same windows.
    """

    tokens: NDArray[np.uint16]
    ends: NDArray[np.int64]
    sources: NDArray[np.uint16]
    names: list[str]

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The packed tokens that `pack` wrote. Raises SettingError."""
        try:
            return cls(
                np.memmap(folder / TOKENS, np.uint16, "r"),
                np.load(folder / ENDS),
                np.load(folder / SOURCES),
                json.loads((folder / NAMES).read_text(encoding="utf-8")),
            )
        except (OSError, ValueError) as error:
            raise SettingError(
                f"There are no packed tokens in {str(folder)!r} ({error}). Make them with "
                "`python -m training prepare`."
            ) from error

    def order(self, passes: Mapping[str, float], random: np.random.Generator) -> NDArray[np.int64]:
        """The documents of one epoch, shuffled.

        Documents of a source come as often as `passes` says, once by default; for a fraction, a
        random part of them comes once more.
        """
        unknown = sorted(set(passes) - set(self.names))
        if unknown:
            raise SettingError(
                f"There is no source {unknown[0]!r}. Choose from: {', '.join(self.names)}."
            )
        repeats = np.array([passes.get(name, 1.0) for name in self.names])[self.sources]
        times = np.floor(repeats + random.random(len(repeats))).astype(np.int64)
        order = np.repeat(np.arange(len(repeats)), times)
        random.shuffle(order)
        return order

    def windows(
        self, length: int, passes: Mapping[str, float], seed: int
    ) -> Iterator[NDArray[np.uint16]]:
        """Pieces of `length` + 1 tokens, epoch after epoch without end."""
        starts = np.concatenate(([0], self.ends[:-1]))
        for epoch in count():
            order = self.order(passes, np.random.default_rng((seed, epoch)))
            pieces = [self.tokens[starts[at] : self.ends[at]] for at in order]
            stream = np.concatenate(pieces) if pieces else self.tokens[:0]
            if len(stream) <= length:
                raise SettingError(
                    f"An epoch has {len(stream):,} tokens, fewer than a window of {length:,}. "
                    "Prepare more text or choose shorter windows."
                )
            for at in range(0, len(stream) - length, length):
                yield stream[at : at + length + 1]


def pack(folder: Path, documents: Iterable[tuple[str, list[int]]]) -> Corpus:
    """Pack documents, each a source and its tokens. Raises SettingError if there are none."""
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[str, int] = {}
    ends: list[int] = []
    sources: list[int] = []
    end = 0
    with (folder / TOKENS).open("wb") as file:
        for source, tokens in documents:
            file.write(np.array(tokens, np.uint16).tobytes())
            end += len(tokens)
            ends.append(end)
            sources.append(names.setdefault(source, len(names)))
    if not end:
        raise SettingError(
            "There is no text to pack: the files or the sample of them are empty, or all of it is "
            "held out. Take more text."
        )
    np.save(folder / ENDS, np.array(ends, np.int64))
    np.save(folder / SOURCES, np.array(sources, np.uint16))
    (folder / NAMES).write_text(json.dumps(list(names)) + "\n", encoding="utf-8")
    return Corpus.open(folder)
