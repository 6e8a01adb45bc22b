"""The texts of the Models tab as HTML. All names are escaped."""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from app.service.catalogue import TABLE_CONTEXT, Entry, Head, Model
from app.service.current import NO_HEAD, drafters, mixture, verified
from app.service.draft_models import amount
from app.service.models import Candidate, is_padded
from app.service.ways import LLAMA_CPP, computed_by, fewer_bits
from app.web.markup import Facts, billions, facts, finding, fine_print, millions, template
from assets import ASSETS
from engine.backends.base import BackendInfo
from engine.drafting.ceiling import LIKELY, ceiling
from engine.models.formats import format_of
from engine.models.memory import Need
from engine.servers.client import is_address

HALVES = ("bfloat16", "float16")
DRAFT_SIZES = 3, 7, 15
"""The numbers of drafted tokens whose verification cost is shown."""
QUANTIZED, CHEAP = ("Q", "IQ"), ("Q4_0", "IQ4_NL")
"""The prefixes of quantized types, and the types that verify fast on processors, as measured in
docs/benchmarks.md."""
LITTLE = 1.5
"""Below this speedup, the page suggests files that verify faster, and says why a mixture of experts
does not."""
LATER = "to be downloaded"
THINNEST = 0.6
"""The smallest visible part of a bar, in per cent."""


# models on this machine


def loaded(
    info: BackendInfo,
    source: str,
    drafts: Sequence[str] = (),
    costs: str = "",
    plain: str = "",
) -> str:
    """The facts of the loaded model. `source` is "" if none is loaded. `drafts` names its draft
    models, `costs` says how long verifying takes, and `plain` gives its speed of plain decoding."""
    length = f"{info.context_length:,} tokens" if info.context_length else "not reported"
    listed = [("model", info.name), ("context", length), ("from", source)]
    if info.server is None:
        count = f", {info.threads} thread{'s' if info.threads > 1 else ''}" if info.threads else ""
        listed = [
            ("model", info.name),
            ("run by", computed_by(info, source)),
            ("parameters", billions(info.parameters)),
            ("weights", f"{info.dtype}, {amount(info.memory_bytes)}"),
            ("context", length),
            ("device", f"{info.device}{count}"),
            ("from", where(source)),
            *([("speed", plain)] if plain else []),
        ]
    return template(
        "loaded.html",
        info=info,
        listed=listed if source else [],
        drafting=[(each.name, each.text) for each in drafters(info, drafts)],
        costs=costs,
        padded=is_padded(source),
        halved=halved(info),
        few_bits=fewer_bits(info),
    )


def still_loaded(info: BackendInfo, source: str) -> str:
    """The model that is still loaded after another one failed to load; nothing without one."""
    return fine_print(f"{info.name} is loaded, as before.") if source else ""


def verifying(info: BackendInfo, points: Mapping[int, float], other_files: bool = True) -> str:
    """The time that verifying drafts takes, and the speedup that this allows; nothing if it was not
    measured or the model cannot verify drafts.

    `points` holds the measured seconds of a forward by its number of nodes. `other_files` says that
    there may be files of the same model with other weights."""
    found = verified(info, points)
    sizes = [n for n in DRAFT_SIZES if n in found]
    if not sizes:
        return ""
    nodes = listing(str(n) for n in sizes)
    times = listing(f"{found[n]:.1f}" for n in sizes)
    best = ceiling(found, LIKELY)
    gain = f"at most {best.speedup:.1f} times as fast" if best.nodes else "no faster"
    why = f", {mixture(info)}" if info.experts and best.speedup < LITTLE else ""
    text = (
        f"Verifying {nodes} drafted tokens takes {times} times as long here as computing one{why}. "
        f"So drafts of which {100 * LIKELY:.0f} % are accepted make it {gain}."
    )
    quantized = (
        info.kind == LLAMA_CPP and info.dtype.startswith(QUANTIZED) and info.dtype not in CHEAP
    )
    if other_files and quantized and info.device == "cpu" and best.speedup < LITTLE:
        text += (
            f" On a processor {' and '.join(CHEAP)} files of the same model verify faster than "
            f"{info.dtype}, so drafts gain more with them."
        )
    return text


def listing(items: Iterable[str]) -> str:
    *first, last = items
    return f"{', '.join(first)} or {last}" if first else last


def halved(info: BackendInfo) -> bool:
    """Whether a model computes in reduced precision that could also compute in float32."""
    return info.kind == "transformers" and info.dtype in HALVES


def choice(candidate: Candidate) -> tuple[str, str]:
    if is_address(candidate.source):
        size = where(candidate.source)
    elif candidate.bytes:
        size = amount(candidate.bytes)
    else:
        size = f"{amount(candidate.download)} to download" if candidate.download else LATER
    kind = "GGUF" if candidate.kind == LLAMA_CPP else candidate.kind
    parts = [candidate.name, kind, size, *(["loaded"] if candidate.loaded else [])]
    return " · ".join(parts), candidate.source


def where(source: str) -> str:
    """The shortest form of a path: relative to this program or to the home folder if possible."""
    path = Path(source)
    for root, name in ((ASSETS.parent, Path()), (Path(os.path.expanduser("~")), Path("~"))):
        if path.is_absolute() and path.is_relative_to(root):
            return str(name / path.relative_to(root))
    return source


def need(source: str, found: Need, free: int, device: str) -> str:
    listed = [
        ("model", where(source)),
        ("parameters", billions(found.parameters)),
        ("weights", amount(found.weights)),
        ("cache", amount(found.cache)),
        ("total", f"{amount(found.total)} of {amount(free)} free on {device}"),
    ]
    drafting: Facts = ()
    predicted = found.forecast
    if predicted is not None:
        head = predicted.head or predicted.problem or NO_HEAD
        drafting = ("databases", guesses_per_token(predicted.chains)), ("built-in head", head)
    return template(
        "need.html",
        listed=listed,
        bar=bar((found.weights, found.cache), free),
        drafting=drafting,
        padded=is_padded(source),
        missing=amount(found.total - free) if found.total > free else "",
    )


def guesses_per_token(chains: bool) -> str:
    return "one guess per token" if chains else "several guesses per token"


def bar(parts: Sequence[float], free: float) -> str:
    """The parts of a need as shares of the free memory."""
    whole = max(1.0, sum(parts), free)
    widths = [max(THINNEST, 100 * part / whole) for part in parts if part]
    return template(
        "memory_bar.html", widths=widths, over=sum(parts) > free, end=100 * free / whole
    )


def unknown(source: str, problem: str) -> str:
    model = facts([("model", where(source))])
    return model + finding("differs", "It cannot be loaded like this", problem)


def elsewhere(source: str) -> str:
    text = (
        "Loading it asks the server which model it runs and how it drafts. It needs no memory "
        "here. What you write is sent to that server."
    )
    return facts([("server", source)]) + fine_print(text)


def absent(source: str) -> str:
    return facts([("model", where(source))]) + fine_print(
        "It is downloaded first. The memory it needs is known after that."
    )


# the catalogue

CATALOGUE = (
    "<h3>Catalogue</h3><p>Open models with draft models that fit them. They are downloaded from "
    "Hugging Face into its cache, where other programs find them too. The memory shown is for the "
    "context length above.</p>"
)


def broken(problem: str) -> str:
    return finding("differs", "Unknown", problem)


def family(entry: Entry, here: Collection[str], needs: Facts = (), tail: str = "") -> str:
    """The card of a family. `here` holds the sources that are on this machine, `needs` the memory
    that the family takes; `tail` is markup."""
    drafts = [f"{model.name}, {size(model, here)}" for model in entry.drafts]
    listed = [
        ("model", f"{entry.target.name}, {millions(entry.target.parameters)}"),
        ("files", size(entry.target, here, " to download")),
        ("weights", weights_of(entry.target)),
        ("calls tools", "yes" if entry.tools else "no"),
        ("databases", guesses_per_token(bool(entry.target.state_bytes))),
        ("built-in head", head_of(entry.head)),
        ("draft models", "; ".join(drafts) or f"none: {entry.alone}"),
    ]
    if entry.stack:
        listed.append(("suggested", " / ".join(model.name for model in entry.stack)))
    return template("family.html", entry=entry) + facts([*listed, *needs]) + tail


def weights_of(model: Model) -> str:
    ending = format_of(model.source).ending
    return model.source.removesuffix(ending).rpartition("-")[2] if ending else "as published"


def head_of(head: Head | None) -> str:
    if head is None:
        return "none"
    about = "about " if head.estimated else ""
    where = f"in a separate file of {about}{amount(head.bytes)}" if head.bytes else "in its file"
    return f"{head.name}, {where}"


def starter(entry: Entry, fewer_bits: bool = False) -> str:
    """The offer of a real model while the demonstration model is loaded. `fewer_bits` says that a
    processor computes it with weights of 8 bits."""
    return template(
        "family.html",
        starter=True,
        entry=entry,
        size=amount(entry.target.bytes),
        need=amount(entry.target.need(TABLE_CONTEXT, "cpu").total),
        context=f"{TABLE_CONTEXT:,}",
        fewer_bits=fewer_bits,
    )


def size(model: Model, here: Collection[str], otherwise: str = "") -> str:
    """The size of a model's files, followed by whether they are on this machine. `otherwise`
    follows if they are not."""
    text = f"{'about ' if model.estimated else ''}{amount(model.bytes)}"
    return f"{text}, on this machine" if model.source in here else text + otherwise


def family_needs(entry: Entry, length: int, device: str, free: int, half: bool = False) -> Facts:
    """The memory that a family takes, alone and with the suggested draft models, and whether it
    fits. `half` is as for `Model.need`."""

    def with_fit(need: Need) -> str:
        return f"{amount(need.total)}, {'fits' if need.total <= free else 'does not fit'}"

    yield "memory", with_fit(entry.alone_need(length, device, half))
    if entry.stack:
        yield "with drafts", with_fit(entry.need(length, device, half))
