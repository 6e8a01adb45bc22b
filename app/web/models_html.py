"""The texts of the Models tab, as HTML; all names are escaped."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from app.service.catalogue import TABLE_CONTEXT, Entry, Head, Model
from app.service.draft_models import amount
from app.service.drafters import NO_HEAD, drafters
from app.service.models import Candidate, Progress
from app.web.stack_html import Facts, facts, fine, line, millions
from assets import ASSETS
from engine.backends.base import BackendInfo
from engine.drafting.ceiling import LIKELY, ceiling
from engine.models.formats import format_of
from engine.models.memory import Need
from engine.models.outlook import Outlook

FLOAT32, GGUF = "float32", "llama.cpp"
TOLD = 3, 7, 15
"""Drafted tokens by which costs are told."""
QUANTIZED, CHEAP = ("Q", "IQ"), ("Q4_0", "IQ4_NL")
"""How types of few bits are called, and which of them verify fast on processors: measured in
docs/benchmarks.md."""
LITTLE = 1.5
"""A speedup below this is worth the hint."""
THINNEST = 0.6
"""Per cent of a bar that the smallest part of a need takes, so that it is seen."""


# models on this machine


def loaded(
    info: BackendInfo, source: str, formats: str = "", drafts: Sequence[str] = (), costs: str = ""
) -> str:
    """The facts of the loaded model; `source` is "" where none is. `formats` says which of its
    formats is faster here, `drafts` names its draft models, `costs` says what verifying takes."""
    if not source:
        return "<h3>Loaded</h3>" + fine("No model. Choose one and press Load.")
    if info.server is not None:
        return served(info, source)
    threads = f", {info.threads} thread{'s' if info.threads > 1 else ''}" if info.threads else ""
    split = f" on each of {info.ranks} ranks" if info.ranks > 1 else ""
    listed = [
        ("model", info.name),
        ("run by", info.kind),
        ("parameters", billions(info.parameters)),
        ("weights", f"{info.dtype}, {amount(info.memory_bytes)}{split}"),
        ("context", f"{info.context_length:,} tokens"),
        ("device", f"{info.device}{threads}"),
        ("from", where(source)),
    ]
    told = [(each.name, each.words) for each in drafters(info, drafts)]
    words = "".join(map(fine, (info.note, costs, precision(info), formats)))
    return f"<h3>Loaded</h3>{facts(listed)}<h4>What drafts for it</h4>{facts(told)}{words}"


def served(info: BackendInfo, source: str) -> str:
    """The facts of a model that a server runs."""
    length = f"{info.context_length:,} tokens" if info.context_length else "not told"
    listed = [("model", info.name), ("context", length), ("from", source)]
    told = [(each.name, each.words) for each in drafters(info)]
    return (
        f"<h3>Loaded</h3>{facts(listed)}<h4>What drafts for it</h4>{facts(told)}{fine(info.note)}"
    )


def still(info: BackendInfo, source: str) -> str:
    """Which model there is after another one failed; nothing if there is none."""
    return fine(f"{info.name} is loaded, as before.") if source else ""


def verifying(info: BackendInfo, points: Mapping[int, float]) -> str:
    """What verifying drafts takes, by the measured seconds of forwards over so many nodes, and what
    that allows; nothing where it was not measured, or nothing is drafted."""
    found = {n: s for n, s in points.items() if n <= (info.depth or n)}
    told = [n for n in TOLD if n in found]
    if not info.can_tree or not told:
        return ""
    # More rows take no less time, whatever a busy machine measured.
    found[0] = min(found.values())
    nodes, times = (
        listing(f"{each:{form}}" for each in values)
        for values, form in ((told, "d"), ([found[n] / found[0] for n in told], ".1f"))
    )
    best = ceiling(found, LIKELY)
    gain = f"at most {best.speedup:.1f} times as fast" if best.nodes else "no faster"
    words = (
        f"Verifying {nodes} drafted tokens takes {times} times as long here as computing one. "
        f"So drafts of which {100 * LIKELY:.0f} % are accepted make it {gain}."
    )
    quantized = info.kind == GGUF and info.dtype.startswith(QUANTIZED) and info.dtype not in CHEAP
    if quantized and info.device == "cpu" and best.speedup < LITTLE:
        words += (
            f" On a processor {' and '.join(CHEAP)} files of the same model verify faster than "
            f"{info.dtype}, so drafts gain more with them."
        )
    return words


def listing(words: Iterable[str]) -> str:
    """1, 2 or 3."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def precision(info: BackendInfo) -> str:
    """What coarser numbers than float32 mean, for a model that could have those as well."""
    if info.kind != "transformers" or info.dtype == FLOAT32:
        return ""
    return (
        f"It computes in {info.dtype}, which takes half the memory of float32. Where two tokens "
        "are tied to within its rounding, a draft may tip the choice, so a text may part from "
        "plain decoding's there. In float32 they are the same."
    )


def choice(candidate: Candidate) -> tuple[str, str]:
    """A candidate's label and value."""
    size = amount(candidate.bytes) if candidate.bytes else "to be downloaded"
    if candidate.download and not candidate.bytes:
        size = f"{amount(candidate.download)} to download"
    if format_of(candidate.source).elsewhere:
        size = where(candidate.source)
    words = [candidate.name, candidate.kind, size, *(["loaded"] if candidate.loaded else [])]
    return " · ".join(words), candidate.source


def where(source: str) -> str:
    """A path as short as it can be: below this program, or below the home folder."""
    path = Path(source)
    for root, name in ((ASSETS.parent, Path()), (Path.home(), Path("~"))):
        if path.is_absolute() and path.is_relative_to(root):
            return str(name / path.relative_to(root))
    return source


def need(source: str, found: Need, free: int, device: str) -> str:
    """What a model will take, against what is free for it."""
    listed = [
        ("model", where(source)),
        ("parameters", billions(found.parameters)),
        ("weights", amount(found.weights)),
        ("cache", amount(found.cache)),
        ("total", f"{amount(found.total)} of {amount(free)} free on {device}"),
    ]
    markup = facts(listed) + bar((found.weights, found.cache), free) + outlook(found.outlook)
    if found.total > free:
        missing = amount(found.total - free)
        words = f"{missing} are missing. Choose a shorter context or a smaller model."
        return markup + line("differs", "It does not fit", words)
    return markup + fine("Memory of the loaded models counts as free: they are unloaded if needed.")


def outlook(found: Outlook | None) -> str:
    """What will draft for a model that is not loaded, as far as its files tell; nothing where they
    do not."""
    if found is None:
        return ""
    told = [
        ("databases", "chains" if found.chains else "trees"),
        ("head", found.head or found.problem or NO_HEAD),
    ]
    return f"<h4>What will draft for it, by its files</h4>{facts(told)}"


def bar(parts: Sequence[float], free: float) -> str:
    """Parts of a need as a share of what is free; red, with a mark at its end, if they are more."""
    whole = max(1.0, sum(parts), free)
    widths = [max(THINNEST, 100 * part / whole) for part in parts if part]
    filled = "".join(f'<i style="width:{width:.2f}%"></i>' for width in widths)
    kind, mark = "need", ""
    if sum(parts) > free:
        kind, mark = "need over", f'<b style="left:{100 * free / whole:.2f}%"></b>'
    return f'<div class="{kind}"><div class="bar empty">{filled}</div>{mark}</div>'


def unknown(source: str, problem: str) -> str:
    """Why the memory that a model needs is not known."""
    return facts([("model", where(source))]) + line(
        "differs", "It cannot be loaded like this", problem
    )


def elsewhere(source: str) -> str:
    """A model that a server runs."""
    words = (
        "Loading it asks the server which model it has and what drafts there. It takes no memory "
        "here. What you write is sent to that server."
    )
    return facts([("server", source)]) + fine(words)


def absent(source: str) -> str:
    """A model that is not on this machine."""
    words = "Loading it downloads it. The memory it needs is known after that."
    return facts([("model", where(source))]) + fine(words)


def progress(report: Progress) -> str:
    """A bar that fills, or that moves where nobody knows how far it is."""
    if report.share is None:
        return (
            '<div class="progress"><div class="bar empty"><i class="moving"></i></div>'
            f"<small>{escape(report.words)}</small></div>"
        )
    return (
        f'<div class="progress"><div class="bar empty"><i style="width:{100 * report.share:.1f}%">'
        f"</i></div><small>{escape(report.words)} · {100 * report.share:.0f} %</small></div>"
    )


# the catalogue

CATALOGUE = (
    "<h3>Catalogue</h3><p>Open models with draft models that fit them. They are downloaded from "
    "Hugging Face into its cache, where other programs find them too. The memory shown is for the "
    "context length above.</p>"
)


def broken(problem: str) -> str:
    """Why a part of the catalogue cannot be shown."""
    return line("differs", "Unknown", problem)


def family(entry: Entry, here: Collection[str], needs: Facts = (), tail: str = "") -> str:
    """What a family is. `here` holds the sources of what is on this machine, `needs` what the
    family takes there; `tail` is markup."""
    link = f'<a href="{escape(entry.licence_address)}" target="_blank" rel="noopener noreferrer">'
    head = (
        f"<h4>{escape(entry.name)}</h4><p>{escape(entry.maker)} · {link}{escape(entry.licence)}</a>"
        f"</p><p>{escape(entry.description)}</p>"
    )
    drafts = [f"{model.name}, {size(model, here)}" for model in entry.drafts]
    listed = [
        ("model", f"{entry.target.name}, {millions(entry.target.parameters)}"),
        ("files", size(entry.target, here, " to download")),
        ("weights", weights_of(entry.target)),
        ("databases", "draft chains" if entry.target.state_bytes else "draft trees"),
        ("head", head_of(entry.head)),
        ("draft models", "; ".join(drafts) or f"none: {entry.alone}"),
    ]
    if entry.stack:
        listed.append(("suggested", " / ".join(model.name for model in entry.stack)))
    return head + facts([*listed, *needs]) + tail


def weights_of(model: Model) -> str:
    """The type of a model's weights, by the name of its file."""
    ending = format_of(model.source).ending
    return model.source.removesuffix(ending).rpartition("-")[2] if ending else "as published"


def head_of(head: Head | None) -> str:
    """What a target brings to guess ahead with, and where it is."""
    if head is None:
        return "none"
    about = "about " if head.estimated else ""
    where = f"in a file of {about}{amount(head.bytes)} beside it" if head.bytes else "in its file"
    return f"{head.name}, {where}"


def starter(entry: Entry, device: str = "cpu") -> str:
    """What is offered beside the demonstration model, in a few lines."""
    target = entry.target
    need = target.need(TABLE_CONTEXT, device)
    link = f'<a href="{escape(entry.licence_address)}" target="_blank" rel="noopener noreferrer">'
    source = f"https://huggingface.co/{format_of(target.source).repository(target.source)}"
    home = f'<a href="{escape(source)}" target="_blank" rel="noopener noreferrer">'
    return (
        f"<h3>A real model, one click away: {escape(entry.name)}</h3>"
        f"<p>{escape(entry.description)}</p>"
        f'<p class="fine">{amount(target.bytes)} to download · {link}{escape(entry.licence)}</a> · '
        f"{amount(need.total)} of memory with {TABLE_CONTEXT:,} tokens of context · by "
        f"{escape(entry.maker)}, {home}on Hugging Face</a></p>"
    )


def size(model: Model, here: Collection[str], otherwise: str = "") -> str:
    """How large the files of a model are, then that they are here, or else `otherwise`."""
    words = f"{'about ' if model.estimated else ''}{amount(model.bytes)}"
    return f"{words}, on this machine" if model.source in here else words + otherwise


def billions(parameters: int) -> str:
    """A number of parameters, without the word."""
    return millions(parameters).removesuffix(" parameters")


def family_needs(entry: Entry, length: int, device: str, free: int, half: bool = False) -> Facts:
    """What a family takes, alone and with the suggested drafts, and whether so much is free. `half`
    as for `Model.need`."""

    def told(need: Need) -> str:
        return f"{amount(need.total)}, {'fits' if need.total <= free else 'does not fit'}"

    yield "memory", told(entry.alone_need(length, device, half))
    if entry.stack:
        yield "with drafts", told(entry.need(length, device, half))
