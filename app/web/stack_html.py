"""The texts of the Stack tab, as HTML; all names are escaped.

Draft models can fail in three ways, which have names here: slower than plain, output drift, not
enough memory. Each comes with its reason and with what to change.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from html import escape

from app.service.draft_models import Candidate, Stacks, amount
from app.service.families import Family, sampler_of, sampler_words
from app.web.metrics_panel import times
from engine.hsd.diagnosis import reasons
from engine.hsd.planner import DATABASES, HEAD, MERGED, SOURCES, Plan, Recursion, memory, singles
from engine.hsd.profile import OFF, Profile
from engine.hsd.trials import Trial
from engine.settings import Sampling
from engine.types import Rule

PROFILE, PLAN = "<h3>Profile</h3>", "<h3>Plan</h3>"
DRAFTING = {
    "": "",
    DATABASES: "The databases draft",
    HEAD: "Its own head drafts",
    MERGED: "The databases and its own head draft",
}
Facts = Iterable[tuple[str, str]]


def facts(items: Facts) -> str:
    """Names and values."""
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in items)
    return f"<dl>{lines}</dl>"


def fine(*sentences: str) -> str:
    """A quiet paragraph; nothing for no words."""
    words = " ".join(sentence for sentence in sentences if sentence)
    return f'<p class="fine">{escape(words)}</p>' if words else ""


def line(kind: str, title: str, words: str) -> str:
    """A finding: `kind` is a class of the style sheet."""
    return f'<div class="verdict {kind}"><b>{escape(title)}</b>: {escape(words)}</div>'


def millions(parameters: int) -> str:
    """A number of parameters for people."""
    if parameters >= 1e9:
        return f"{parameters / 1e9:,.1f} B parameters"
    return f"{parameters / 1e6:,.1f} M parameters"


def per_token(seconds: float | None) -> str:
    """Time per token."""
    return f"{1e3 * seconds:.3g} ms" if seconds is not None else "–"


# models


def choice(candidate: Candidate) -> tuple[str, str]:
    """A candidate's label and value."""
    need = candidate.need
    if need is None:
        return f"{candidate.name} · cannot be used", candidate.source
    words = f"{candidate.name} · {millions(need.parameters)} · {amount(need.total)}"
    return words, candidate.source


def models(stacks: Stacks, offered: Sequence[Candidate], ticked: Sequence[str]) -> str:
    """What is loaded, what the ticked ones would need, and what is free."""
    info = stacks.state.info
    if info.server is not None:
        return fine(
            f"{info.name} runs on {info.server.host}, where draft models cannot be loaded from "
            "here. Load a model on this machine to plan a stack for it."
        )
    candidates = {candidate.source: candidate for candidate in offered}
    loaded = set(stacks.sources.values())
    needs = [c.need for s in ticked if s not in loaded and (c := candidates.get(s)) and c.need]
    total, free = sum(need.total for need in needs), stacks.free()
    present = [c.need.total for s in loaded if (c := candidates.get(s)) and c.need]
    listed = [
        ("main model", f"{info.name}, {millions(info.parameters)}"),
        ("drafts loaded", ", ".join(stacks.sources) or "none"),
    ]
    if present:
        listed.append(("they use", amount(sum(present))))
    listed.append(("free", f"{amount(free)} on {info.device}"))
    if needs:
        listed.append(("ticked need", f"{amount(total)} more, weights and cache"))
    markup = facts(listed)
    for candidate in candidates.values():
        if candidate.problem and candidate.source in (*ticked, *loaded):
            markup += line("differs", candidate.name, candidate.problem)
    if total > free:
        words = f"{amount(total - free)} are missing. Tick fewer or smaller models."
        markup += line("differs", "Not enough memory", words)
    return markup


# profile


def profiled(stacks: Stacks, sampling: Sampling) -> str:
    """What the profile in use was measured with, and whether that fits the settings."""
    family, wanted = stacks.family_for(sampling), sampler_words(sampler_of(sampling))
    if family is None:
        return PROFILE + fine(
            "Load draft models first. A profile then measures how often each model accepts the "
            "drafts of smaller ones, and how long its steps take here."
        )
    profile = family.profile
    if profile is None:
        return PROFILE + fine(
            f"{', '.join(family.drafts)} and {stacks.state.info.name} have no profile yet. Press "
            "Profile: it takes as long as a few answers, and uses the sampling of the Settings "
            f"tab ({wanted})."
        )
    markup = facts(
        [
            ("measured", f"{datetime.fromtimestamp(profile.measured):%d %b %Y %H:%M}"),
            ("sampling", sampler_words(profile.sampling)),
            ("positions", f"{profile.positions:,}"),
            ("models", ", ".join(model.name for model in profile.models)),
        ]
    )
    if dict(profile.sampling) != sampler_of(sampling):
        markup += fine(
            f"The settings say {wanted}. This is the nearest profile; press Profile to measure "
            "that one."
        )
    return PROFILE + markup


def progress(what: str, share: float) -> str:
    """A bar that fills."""
    return (
        f'<div class="progress"><div class="bar empty"><i style="width:{100 * share:.1f}%"></i>'
        f"</div><small>{escape(what)} … {100 * share:.0f} %</small></div>"
    )


# plans


def sentence(plan: Plan, target: str) -> str:
    """A plan in words."""
    who = DRAFTING[plan.source]
    if not plan.levels:
        return f"{who or 'Nothing drafts'} for {target}."
    first = plan.levels[0].model
    start = f"{who} for {first}; " if who else ""
    receivers = [*(level.model for level in plan.levels[1:]), target]
    parts = [
        f"{level.model} drafts {level.batch} token{'s' if level.batch > 1 else ''} at a time "
        f"for {receiver}"
        for level, receiver in zip(plan.levels, receivers, strict=True)
    ]
    return f"{start}{'; '.join(parts)}, which checks them in one step."


def remark(profile: Profile | None, rule: Rule) -> str:
    """What the stack that drafted last took beside what was predicted; empty until that is known.

    It was planned again where the two were too far apart (engine/hsd/profile.py).
    """
    own = [name for name in profile.outcomes if name.split(" ")[0] == rule] if profile else []
    if profile is None or not own or profile.factor(own[-1]) == 1.0:
        return ""
    found, name = profile.outcomes[own[-1]], own[-1].removeprefix(f"{rule} ")
    plain, tokens = sum(o.plain_seconds for o in found), sum(o.tokens for o in found)
    predicted, measured = (
        plain / sum(o.expected for o in found),
        plain / sum(o.seconds for o in found),
    )
    again = "; planned again" if not 1 / OFF <= profile.factor(own[-1]) <= OFF else ""
    return (
        f"{name}: predicted {times(predicted)}, measured {times(measured)} over the last "
        f"{tokens:,} tokens{again}."
    )


def planned(
    family: Family | None,
    rule: Rule,
    plan: Plan | None,
    spec: str,
    learned: Profile | None = None,
) -> str:
    """The best plan, or the one of `spec`, and what it is expected to take; `learned` is the
    profile with what answers took."""
    if family is None or family.profile is None or plan is None:
        return PLAN + fine("A plan says which models draft for which. It needs a profile.")
    profile, recursion = family.profile, Recursion(family.profile, rule)
    plain, seconds = profile.target.seconds(0), recursion.latency(plan)
    listed = [
        ("plan", f"{plan}{'' if spec else ', the best one'}"),
        ("predicted", f"{per_token(seconds)} per token, decoding {times(plain / seconds)}"),
        ("plain", f"{per_token(plain)} per token"),
    ]
    for source, has in SOURCES.items():
        if profile.target.rounds(*has) is not None:
            alone = recursion.latency(Plan((), *has))
            words = f"{per_token(alone)}, decoding {times(plain / alone)}"
            listed.append((f"{source} only", words))
    listed.append(("memory", f"{amount(memory(profile, plan))} of weights"))
    words = escape(sentence(plan, profile.target.name))
    return f"{PLAN}<p>{words}</p>{facts(listed)}{fine(remark(learned, rule))}"


def no_plan(problem: str) -> str:
    """Why the plan that was typed cannot be used."""
    return PLAN + line("differs", "No such plan", problem)


def findings(family: Family | None, rule: Rule, plan: Plan | None, trials: Sequence[Trial]) -> str:
    """What is wrong with the plan, with the stacks in general, and with what was measured."""
    if family is None or family.profile is None or plan is None:
        return ""
    profile, recursion = family.profile, Recursion(family.profile, rule)
    lines = [line("differs", "Output drift", words) for words in drifts(trials)]
    if not plan.levels:
        return "".join([*lines, *without_stack(family, rule, plan, trials)])
    if words := slower(recursion, plan, rule, trials):
        better = best_plan(family, rule, plan, recursion)
        return "".join([*lines, line("differs", "Slower than plain", words + better)])
    gain = profile.target.seconds(0) / recursion.latency(plan)
    words = f"{plan} is predicted to decode {times(gain)} as fast as plain decoding."
    return "".join([*lines, line("same", "Draft models are worth it", words)])


def without_stack(family: Family, rule: Rule, plan: Plan, trials: Sequence[Trial]) -> Iterator[str]:
    """Why no draft model is used: what each would take by itself, and what that comes from."""
    profile, recursion = family.profiled(), Recursion(family.profiled(), rule)
    alone = f"The {plan.source} alone" if plan.source else "Plain decoding"
    words = f"{alone}: {per_token(recursion.latency(plan))} per token, predicted."
    if better := best_plan(family, rule, plan, recursion):
        yield line("", "No draft model is used", words + better)
        return
    yield line("", "No draft model is worth it here", words)
    for single in singles(profile, rule).values():
        seconds = per_token(recursion.latency(single))
        if words := slower(recursion, single, rule, trials):
            yield line("", "Slower than plain", words)
        elif plan.source:
            yield line(
                "", f"Predicted slower than the {plan.source}", f"{single}, {seconds} per token."
            )


def best_plan(family: Family, rule: Rule, plan: Plan, recursion: Recursion) -> str:
    """What to use instead of a plan, if there is anything better."""
    best = family.plan("", rule)
    if best == plan:
        return ""
    return f" Predicted to be fastest: {best}, {per_token(recursion.latency(best))}."


def slower(recursion: Recursion, plan: Plan, rule: Rule, trials: Sequence[Trial]) -> str:
    """Why a plan does not pay, as measured if it was, else as predicted; empty if it does.

    Measured times are compared with each other: the machine may have been slower all over.
    """
    plain, predicted = recursion.profile.target.seconds(0), recursion.latency(plan)
    measured = {trial.title: trial.seconds for trial in trials}
    took = measured.get(str(plan))
    if took is None:
        words = f"{plan} is predicted to take {per_token(predicted)} per token, plain decoding "
        words += f"{per_token(plain)}."
        slow = predicted >= plain
    else:
        alone = trials[0].seconds
        words = f"{plan} took {per_token(took)} per token, plain decoding {per_token(alone)}."
        slow = took >= alone
    if not slow:
        return ""
    if predicted < plain:
        return (
            f"{words} The prediction was {per_token(predicted)} and {per_token(plain)}. The "
            "profile was measured on other text or under another load. Profile again."
        )
    return " ".join([words, *reasons(recursion, plan, rule)])


def drifts(trials: Sequence[Trial]) -> list[str]:
    """Texts that should have been those of plain decoding, and were not."""
    return [
        f"{trial.title} differed from plain decoding at token "
        f"{trial.verdict.position:,} ({trial.verdict.accelerated!r}, not {trial.verdict.plain!r}). "
        "In reduced precision, rounding can decide between two tokens that are almost equally "
        "likely. Load the models in float32 to be sure."
        for trial in trials
        if trial.same_text and not trial.verdict.identical
    ]


def outcome(trials: Sequence[Trial]) -> str:
    """What was measured, in one line."""
    if not trials:
        return fine(
            "Measure answers the same prompts with plain decoding, each draft model and the best "
            "plans. The chart then shows these times beside the predicted ones."
        )
    fastest = max(trials, key=lambda trial: trial.speedup.whole or 0.0)
    checked = [trial for trial in trials[1:] if trial.same_text]
    same = sum(trial.verdict.identical for trial in checked)
    words = (
        f"Fastest: {fastest.title}, whole answers {times(fastest.speedup.whole)} as fast as plain "
        f"decoding; decoding alone {times(fastest.speedup.decoding)}, "
        f"{per_token(fastest.seconds)} per token."
    )
    if fastest is trials[0]:
        words = f"Plain decoding was the fastest, {per_token(fastest.seconds)} per token."
    if checked:
        words += f" {same} of {len(checked)} gave the text of plain decoding, token by token."
    if len(checked) < len(trials) - 1:
        words += (
            " Other texts are expected here: Same distribution does not keep the text of a seed."
        )
    return fine(words)
