"""The texts of the Models tab as HTML. All names are escaped."""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from app.service.catalogue import TABLE_CONTEXT, Entry, Head, Model
from app.service.current import NO_HEAD, drafters
from app.service.draft_models import amount
from app.service.models import Candidate, is_padded
from app.web.markup import Facts, facts, finding, fine_print, millions, template
from assets import ASSETS
from engine.backends.base import BackendInfo
from engine.drafting.ceiling import LIKELY, ceiling
from engine.models.formats import format_of
from engine.models.gguf_files import ENDING
from engine.models.memory import DraftingForecast, Need
from engine.native import multiplies_few_bits, verifies_cheaply
from engine.servers.client import is_address

FLOAT32, GGUF = "float32", "llama.cpp"
HALVES = ("bfloat16", "float16")
DRAFT_SIZES = 3, 7, 15
"""The numbers of drafted tokens whose verification cost is shown."""
QUANTIZED, CHEAP = ("Q", "IQ"), ("Q4_0", "IQ4_NL")
"""The prefixes of quantized types, and the types that verify fast on processors, as measured in
docs/benchmarks.md."""
PADDED = (
    "This is no real model. It is the demonstration model, padded to the cost of 0.5\u00a0B "
    "parameters: it says nearly the same, at the pace of a real model. All parameters but 10 M are "
    "padding."
)
IMITABLE = (
    "Its chat template separates turns with ordinary text, so a message or a file that you paste "
    "can imitate a turn of the conversation."
)
LLAMA_CPP = (
    "In llama.cpp verifying a draft takes long on a processor. If this is a Llama, Mistral, Qwen 2 "
    "or Qwen 3 model, load it with 8 Bits: Strata then computes it itself, with the 4 or 8 bits of "
    "the file where it has these, and drafts gain more."
)
ROUNDABLE, LARGE = (FLOAT32, *HALVES), 100_000_000
"""The types of weights that *Bits* can round, and the parameters from which on it is suggested."""
LITTLE = 1.5
"""Below this speedup, the page suggests files that verify faster."""
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
    if not source:
        return "<h3>Loaded</h3>" + fine_print("No model. Choose one and press Load.")
    if info.server is not None:
        return served(info, source)
    threads = f", {info.threads} thread{'s' if info.threads > 1 else ''}" if info.threads else ""
    listed = [
        ("model", info.name),
        ("run by", runner(info, source)),
        ("parameters", billions(info.parameters)),
        ("weights", f"{info.dtype}, {amount(info.memory_bytes)}"),
        ("context", f"{info.context_length:,} tokens"),
        ("device", f"{info.device}{threads}"),
        ("from", where(source)),
    ]
    if plain:
        listed.append(("speed", plain))
    padded = PADDED if is_padded(source) else ""
    turns = IMITABLE if info.imitable else ""
    reduced = precision(info), fewer_bits(info)
    return loaded_card(info, listed, drafts, padded, info.note, turns, costs, *reduced)


def runner(info: BackendInfo, source: str) -> str:
    """What computes a model."""
    in_core = info.kind != GGUF and source.endswith(ENDING)
    return "the compiled core" if in_core else info.kind


def served(info: BackendInfo, source: str) -> str:
    length = f"{info.context_length:,} tokens" if info.context_length else "not reported"
    listed = [("model", info.name), ("context", length), ("from", source)]
    return loaded_card(info, listed, (), info.note)


def loaded_card(info: BackendInfo, listed: Facts, drafts: Sequence[str], *notes: str) -> str:
    """The card of a loaded model: its facts, what drafts for it, and notes."""
    drafting = facts((each.name, each.text) for each in drafters(info, drafts))
    text = "".join(map(fine_print, notes))
    return f"<h3>Loaded</h3>{facts(listed)}<h4>What drafts for it</h4>{drafting}{text}"


def still_loaded(info: BackendInfo, source: str) -> str:
    """The model that is still loaded after another one failed to load; nothing without one."""
    return fine_print(f"{info.name} is loaded, as before.") if source else ""


def verifying(info: BackendInfo, points: Mapping[int, float], other_files: bool = True) -> str:
    """The time that verifying drafts takes, and the speedup that this allows; nothing if it was not
    measured or the model cannot verify drafts.

    `points` holds the measured seconds of a forward by its number of nodes. `other_files` says that
    there may be files of the same model with other weights."""
    found = {n: s for n, s in points.items() if n <= (info.depth or n)}
    sizes = [n for n in DRAFT_SIZES if n in found]
    if not info.can_tree or not sizes:
        return ""
    # A forward over fewer rows cannot take longer; a busy machine may have measured it so.
    found[0] = min(found.values())
    nodes, times = (
        listing(f"{each:{form}}" for each in values)
        for values, form in ((sizes, "d"), ([found[n] / found[0] for n in sizes], ".1f"))
    )
    best = ceiling(found, LIKELY)
    gain = f"at most {best.speedup:.1f} times as fast" if best.nodes else "no faster"
    text = (
        f"Verifying {nodes} drafted tokens takes {times} times as long here as computing one. "
        f"So drafts of which {100 * LIKELY:.0f} % are accepted make it {gain}."
    )
    quantized = info.kind == GGUF and info.dtype.startswith(QUANTIZED) and info.dtype not in CHEAP
    if other_files and quantized and info.device == "cpu" and best.speedup < LITTLE:
        text += (
            f" On a processor {' and '.join(CHEAP)} files of the same model verify faster than "
            f"{info.dtype}, so drafts gain more with them."
        )
    return text


def listing(items: Iterable[str]) -> str:
    """A list in words, such as "1, 2 or 3"."""
    *first, last = items
    return f"{', '.join(first)} or {last}" if first else last


def precision(info: BackendInfo) -> str:
    """The effect of reduced precision, for a model that could also compute in float32."""
    if info.kind != "transformers" or info.dtype not in HALVES:
        return ""
    return (
        f"It computes in {info.dtype}, which takes half the memory of float32. Where two tokens "
        "are almost equally likely, this rounding may decide between them, so a text may differ "
        "from plain decoding. In float32 the two are the same."
    )


def fewer_bits(info: BackendInfo) -> str:
    """What weights of few bits in the compiled core would bring, for a model that computes
    otherwise on a processor."""
    if info.device != "cpu" or not multiplies_few_bits() or info.parameters < LARGE:
        return ""
    if info.kind == GGUF:
        return LLAMA_CPP if verifies_cheaply() else ""
    if info.kind != "transformers" or info.dtype not in ROUNDABLE:
        return ""
    return (
        "In each step the processor reads all weights. If you load the model with 8 or 4 Bits, "
        "there is half or a quarter as much to read as in bfloat16, so it answers sooner. Rounded "
        "weights make it a slightly different model."
    )


def choice(candidate: Candidate) -> tuple[str, str]:
    """The label and value of a candidate."""
    size = amount(candidate.bytes) if candidate.bytes else "to be downloaded"
    if candidate.download and not candidate.bytes:
        size = f"{amount(candidate.download)} to download"
    if is_address(candidate.source):
        size = where(candidate.source)
    kind = "GGUF" if candidate.kind == GGUF else candidate.kind
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
    """The memory that a model needs, compared with the free memory."""
    listed = [
        ("model", where(source)),
        ("parameters", billions(found.parameters)),
        ("weights", amount(found.weights)),
        ("cache", amount(found.cache)),
        ("total", f"{amount(found.total)} of {amount(free)} free on {device}"),
    ]
    markup = facts(listed) + bar((found.weights, found.cache), free) + forecast(found.forecast)
    markup += fine_print(PADDED if is_padded(source) else "")
    if found.total > free:
        missing = amount(found.total - free)
        text = f"{missing} are missing. Choose a shorter context or a smaller model."
        return markup + finding("differs", "It does not fit", text)
    return markup + fine_print(
        "Memory of the loaded models counts as free: they are unloaded if needed."
    )


def guesses_per_token(chains: bool) -> str:
    return "one guess per token" if chains else "several guesses per token"


def forecast(found: DraftingForecast | None) -> str:
    """What will draft for a model that is not loaded, judging by its files; nothing if they do not
    show it."""
    if found is None:
        return ""
    drafting = [
        ("databases", guesses_per_token(found.chains)),
        ("built-in head", found.head or found.problem or NO_HEAD),
    ]
    return f"<h4>What will draft for it, judging by its files</h4>{facts(drafting)}"


def bar(parts: Sequence[float], free: float) -> str:
    """The parts of a need as shares of the free memory. If they exceed it, the bar is red and a
    mark shows where the free memory ends."""
    whole = max(1.0, sum(parts), free)
    widths = [max(THINNEST, 100 * part / whole) for part in parts if part]
    filled = "".join(f'<i style="width:{width:.2f}%"></i>' for width in widths)
    kind, mark = "need", ""
    if sum(parts) > free:
        kind, mark = "need over", f'<b style="left:{100 * free / whole:.2f}%"></b>'
    return f'<div class="{kind}"><div class="bar empty">{filled}</div>{mark}</div>'


def unknown(source: str, problem: str) -> str:
    """Why the memory that a model needs cannot be determined."""
    return facts([("model", where(source))]) + finding(
        "differs", "It cannot be loaded like this", problem
    )


def elsewhere(source: str) -> str:
    """The card of a model that a server runs."""
    text = (
        "Loading it asks the server which model it runs and how it drafts. It needs no memory "
        "here. What you write is sent to that server."
    )
    return facts([("server", source)]) + fine_print(text)


def absent(source: str) -> str:
    """The card of a model that is not on this machine."""
    text = "It is downloaded first. The memory it needs is known after that."
    return facts([("model", where(source))]) + fine_print(text)


# the catalogue

CATALOGUE = (
    "<h3>Catalogue</h3><p>Open models with draft models that fit them. They are downloaded from "
    "Hugging Face into its cache, where other programs find them too. The memory shown is for the "
    "context length above.</p>"
)


def broken(problem: str) -> str:
    """Why a part of the catalogue cannot be shown."""
    return finding("differs", "Unknown", problem)


def family(entry: Entry, here: Collection[str], needs: Facts = (), tail: str = "") -> str:
    """The card of a family. `here` holds the sources that are on this machine, `needs` the memory
    that the family takes; `tail` is markup."""
    drafts = [f"{model.name}, {size(model, here)}" for model in entry.drafts]
    listed = [
        ("model", f"{entry.target.name}, {millions(entry.target.parameters)}"),
        ("files", size(entry.target, here, " to download")),
        ("weights", weights_of(entry.target)),
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
    """The built-in head of a target, and which file holds it."""
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


def billions(parameters: int) -> str:
    return millions(parameters).removesuffix(" parameters")


def family_needs(entry: Entry, length: int, device: str, free: int, half: bool = False) -> Facts:
    """The memory that a family takes, alone and with the suggested draft models, and whether it
    fits. `half` is as for `Model.need`."""

    def with_fit(need: Need) -> str:
        return f"{amount(need.total)}, {'fits' if need.total <= free else 'does not fit'}"

    yield "memory", with_fit(entry.alone_need(length, device, half))
    if entry.stack:
        yield "with drafts", with_fit(entry.need(length, device, half))
