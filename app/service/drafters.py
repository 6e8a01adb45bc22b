"""What drafts for a model, and why not where something does not: in the header, in the Models tab.

Three kinds of drafters: the databases, a head that the model brought with it, and draft models. All
of them are told, whether they draft or not, so that nobody has to guess why a list is empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.backends.base import BackendInfo, ServerInfo
from engine.drafting.costs import LARGEST

NO_HEAD = "none came with this model"
NO_MODELS = "none loaded; the Stack tab has those that fit"


@dataclass(frozen=True, slots=True)
class Drafter:
    """One kind: how it drafts, in words, "" where it does not; then `problem` is why."""

    name: str
    how: str
    problem: str = ""

    @property
    def words(self) -> str:
        """One or the other."""
        return self.how or self.problem


def drafters(info: BackendInfo, models: Sequence[str] = ()) -> tuple[Drafter, ...]:
    """All three of a loaded model. `models` are the loaded draft models, by name. A server drafts
    in its own way."""
    if info.server is not None:
        return (on_server(info.server),)
    plain = "" if info.can_tree else "not possible: this model decodes plainly"
    head, named = info.head, ", ".join(models)
    if plain:
        found = ("", plain), ("", plain if head else NO_HEAD), ("", plain)
    else:
        deep = f"{head.name}, up to {tokens(head.depth)} ahead, as far as it pays" if head else ""
        why = NO_HEAD if head is None else head.note or head.too_dear
        told = ("", why) if why else (deep, "")
        found = (shape(info), ""), told, (named, "" if named else NO_MODELS)
    kinds = "databases", "head", "draft models"
    return tuple(Drafter(name, *each) for name, each in zip(kinds, found, strict=True))


def shape(info: BackendInfo) -> str:
    """In which form drafts are verified: trees where several guesses of a token can be, else
    chains. As many branches as the largest tree has nodes are no bound."""
    form = "chains" if info.leaves == 1 else "trees"
    bounds = [
        f"{info.leaves} branches" if info.leaves and 1 < info.leaves < LARGEST else "",
        tokens(info.depth) if info.depth else "",
    ]
    bound = " and ".join(filter(None, bounds))
    return f"{form} of up to {bound}" if bound else form


def tokens(count: int) -> str:
    """A number of tokens."""
    return f"{count} token{'s' if count != 1 else ''}"


def line(info: BackendInfo, models: Sequence[str] = ()) -> str:
    """What drafts, in a line for the header."""
    found = [f"{each.name} ({each.how})" for each in drafters(info, models) if each.how]
    if info.server is not None:
        each = drafters(info)[0]
        return f"Drafted by the server {each.how}." if each.how else f"The server {each.problem}."
    return f"Drafted by: {', '.join(found) or 'nothing, it decodes plainly'}."


def on_server(server: ServerInfo) -> Drafter:
    """What drafts on a server, as far as that tells."""
    name = "the server"
    if server.drafting:
        return Drafter(name, drafting_words(server))
    if server.sources:
        return Drafter(name, "", "does not draft now")
    return Drafter(name, "", "does not tell whether it drafts")


def drafting_words(server: ServerInfo) -> str:
    """How a server drafts."""
    if not server.databases:
        return "in a way that it does not tell"
    deep = f", up to {tokens(server.draft_tokens)} ahead" if server.draft_tokens else ""
    return f"with its databases{deep}"
