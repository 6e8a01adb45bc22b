"""From texts to packed tokens, and to the tokenizer itself where none is given.

Writes OUTPUT/tokenizer, OUTPUT/train (packed tokens) and OUTPUT/held.jsonl, the documents that are
kept from training, as text: models with other tokenizers are measured on them too.
"""

import argparse
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.errors import SettingError
from training import corpus
from training.documents import Document, read

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `training prepare`."""
    add = parser.add_argument
    add("texts", nargs="+", type=Path, help="JSON lines, also xz-compressed")
    add("--output", required=True, type=Path, help="a folder for tokens and tokenizer")
    add("--tokenizer", type=Path, help="take this one instead of training one")
    add("--vocabulary", type=int, default=6144, help="tokens of a tokenizer to be trained")
    add("--context", type=int, default=2048, help="positions that its models have")
    add("--sample", type=float, default=1.0, help="the part of the documents to take")


def run(options: argparse.Namespace) -> None:
    """Write tokenizer, packed tokens and held-out documents; print what there is."""
    if not 0 < options.sample <= 1:
        raise SettingError(f"The sample is {options.sample}. It must be above 0 and at most 1.")
    if not 300 <= options.vocabulary <= LARGEST:
        raise SettingError(
            f"The vocabulary is {options.vocabulary:,}. It must be from 300 to {LARGEST:,} tokens."
        )
    options.output.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_of(options, options.output / "tokenizer")
    tokens: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    held: Counter[str] = Counter()
    with (options.output / "held.jsonl").open("w", encoding="utf-8") as file:

        def learned() -> Iterator[Document]:
            for document in read(options.texts, options.sample):
                if not document.held:
                    yield document
                    continue
                held[document.source] += 1
                file.write(json.dumps(document.record, ensure_ascii=False) + "\n")

        def packed() -> Iterator[tuple[str, list[int]]]:
            for document, ids in tokenized(tokenizer, learned()):
                tokens[document.source] += len(ids)
                sizes[document.source] += document.size
                yield document.source, ids

        corpus.write(options.output / "train", packed())
    print(f"{'source':24} {'tokens':>12} {'bytes/token':>12} {'held out':>9}")
    for source in sorted(tokens):
        each = sizes[source] / tokens[source]
        print(f"{source:24} {tokens[source]:12,} {each:12.2f} {held[source]:9,}")
    print(f"{'all':24} {tokens.total():12,} {sizes.total() / tokens.total():12.2f}", end=" ")
    print(f"{held.total():9,}")


def tokenizer_of(options: argparse.Namespace, folder: Path) -> TransformersTokenizer:
    """The one that is given, or one made for these texts; its files are in `folder` then."""
    if not options.tokenizer:
        documents = read(options.texts, options.sample)
        texts = (part for each in documents if not each.held for part in each.parts)
        tokenizer = train_tokenizer(texts, options.vocabulary, options.context)
        tokenizer.save_pretrained(folder)
        return tokenizer
    try:
        copy_tokenizer(options.tokenizer, folder)
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise SettingError(
            f"There is no tokenizer in {str(options.tokenizer)!r}: {error}"
        ) from error


def copy_tokenizer(source: Path, target: Path) -> None:
    """Take over the files of a tokenizer as they are: what loads and saves them adds to them."""
    target.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(source / name, target / name)


def train_tokenizer(texts: Iterable[str], size: int, context: int) -> TransformersTokenizer:
    """A byte-level BPE tokenizer with the chat template of the family."""
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
    """The document as a model reads it."""
    if document.messages:
        text = tokenizer.apply_chat_template(list(document.messages), tokenize=False)
        return str(text)
    return str(tokenizer.bos_token) + document.text


def tokenized(
    tokenizer: TransformersTokenizer, documents: Iterable[Document]
) -> Iterator[tuple[Document, list[int]]]:
    """Every document with its tokens."""
    rest = iter(tqdm(documents, desc="Tokens", unit=" documents"))
    while batch := list(islice(rest, BATCH)):
        texts = [rendered(tokenizer, document) for document in batch]
        ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        yield from zip(batch, ids, strict=True)
