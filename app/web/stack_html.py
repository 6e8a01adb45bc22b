"""The texts of the Stack tab as HTML. All names are escaped.

Draft models can fail in three ways: they are slower than plain decoding, the text drifts, or there
is not enough memory. The tab names the failure, its reason, and what to change.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime
from html import escape

from app.service.draft_models import Candidate, Family, Stacks, amount, sampler_label, sampler_of
from app.web.markup import DASH, facts, finding, fine_print, millions, template, times
from engine.hsd.planner import (
    DATABASES,
    HEAD,
    MERGED,
    NAMES,
    Plan,
    Recursion,
    memory,
    singles,
    without_models,
)
from engine.hsd.profile import OFF, Profile
from engine.hsd.trials import Trial, reasons
from engine.settings import Sampling
from engine.types import Rule

PLAN = "<h3>Plan</h3>"
DRAFTING = {
    "": "",
    DATABASES: "The databases draft",
    HEAD: "The built-in head drafts",
    MERGED: "The databases and the built-in head draft",
}


def per_token(seconds: float | None) -> str:
    return DASH if seconds is None else f"{1e3 * seconds:.3g} ms"


# models


def choice(candidate: Candidate) -> tuple[str, str]:
    need, text = candidate.need, "cannot be used"
    if need is not None:
        text = f"{millions(need.parameters)} · {amount(need.total)}"
    return f"{candidate.name} · {text}", candidate.source


def models(stacks: Stacks, offered: Sequence[Candidate], ticked: Sequence[str]) -> str:
    info = stacks.state.info
    if info.server is not None:
        return fine_print(
            f"{info.name} runs on {info.server.host}, where draft models cannot be loaded from "
            "here. Load a model on this machine to plan a stack for it."
        )
    candidates = {candidate.source: candidate for candidate in offered}
    loaded = set(stacks.sources.values())
    needs = [c.need for s in ticked if s not in loaded and (c := candidates.get(s)) and c.need]
    total, free = sum(need.total for need in needs), stacks.free
    present = [c.need.total for s in loaded if (c := candidates.get(s)) and c.need]
    listed = [
        ("main model", f"{info.name}, {millions(info.parameters)}"),
        ("drafts loaded", ", ".join(stacks.sources) or "none"),
    ]
    if present:
        listed.append(("they use", amount(sum(present))))
    listed.append(("free", f"{amount(free)} on {info.device}"))
    if needs:
        listed.append(("selected models need", f"{amount(total)} more, weights and cache"))
    markup = facts(listed)
    for candidate in candidates.values():
        if candidate.problem and candidate.source in (*ticked, *loaded):
            markup += finding("differs", candidate.name, candidate.problem)
    if total > free:
        text = f"{amount(total - free)} are missing. Select fewer or smaller models."
        markup += finding("differs", "Not enough memory", text)
    return markup


# profile


def profiled(stacks: Stacks, sampling: Sampling) -> str:
    """The sampling with which the profile in use was measured, and whether it fits the settings."""
    family = stacks.family_for(sampling)
    profile = family.profile if family is not None else None
    return template(
        "stack_profile.html",
        drafts=list(family.drafts) if family is not None else [],
        model=stacks.state.info.name,
        profile=profile,
        measured=f"{datetime.fromtimestamp(profile.measured):%d %b %Y %H:%M}" if profile else "",
        sampling=sampler_label(profile.sampling) if profile else "",
        used=sampler_label(sampler_of(sampling)),
        fits=profile is not None and dict(profile.sampling) == sampler_of(sampling),
    )


# plans


def sentence(plan: Plan, target: str) -> str:
    drafter = DRAFTING[plan.source]
    if not plan.levels:
        return f"{drafter or 'Nothing drafts'} for {target}."
    first = plan.levels[0].model
    start = f"{drafter} for {first}; " if drafter else ""
    receivers = [*(level.model for level in plan.levels[1:]), target]
    parts = [
        f"{level.model} drafts {level.batch} token{'s' if level.batch > 1 else ''} at a time "
        f"for {receiver}"
        for level, receiver in zip(plan.levels, receivers, strict=True)
    ]
    return f"{start}{'; '.join(parts)}, which checks them in one step."


def remark(profile: Profile | None, rule: Rule) -> str:
    """The measured speed of the stack that drafted last, against its prediction; empty until known.

    A stack whose speed differs too much from its prediction is planned again
    (engine/hsd/profile.py).
    """
    own = [name for name in profile.outcomes if name.split(" ")[0] == rule] if profile else []
    if profile is None or not own or profile.factor(own[-1]) == 1.0:
        return ""
    found, name = profile.outcomes[own[-1]], own[-1].removeprefix(f"{rule} ")
    plain, tokens = sum(o.plain_seconds for o in found), sum(o.tokens for o in found)
    predicted = plain / sum(o.expected for o in found)
    measured = plain / sum(o.seconds for o in found)
    again = "; planned again" if not 1 / OFF <= profile.factor(own[-1]) <= OFF else ""
    return (
        f"{name}: predicted {times(predicted)}, measured {times(measured)} over the last "
        f"{tokens:,} tokens{again}."
    )


def planned(
    family: Family | None, rule: Rule, plan: Plan | None, spec: str, learned: Profile | None = None
) -> str:
    """The best plan, or the one that `spec` requests, and its predicted time. `learned` is the
    profile with the times that answers took."""
    if family is None or family.profile is None or plan is None:
        return PLAN + fine_print("A plan says which models draft for which. It needs a profile.")
    profile, recursion = family.profile, Recursion(family.profile, rule)
    plain, seconds = profile.target.seconds(0), recursion.latency(plan)
    listed = [
        ("plan", f"{plan}{'' if spec else ', the best one'}"),
        ("predicted", f"{per_token(seconds)} per token, decoding {times(plain / seconds)}"),
        ("plain", f"{per_token(plain)} per token"),
    ]
    for source, drafting in without_models(profile, family.allowed).items():
        took = recursion.latency(drafting)
        listed.append((f"{source} only", f"{per_token(took)}, decoding {times(plain / took)}"))
    listed.append(("memory", f"{amount(memory(profile, plan))} of weights"))
    text = escape(sentence(plan, profile.target.name))
    head = family.target.info.head
    why = f"The {head.name} head is {head.expensive}." if head and head.expensive else ""
    return f"{PLAN}<p>{text}</p>{facts(listed)}{fine_print(why, remark(learned, rule))}"


def findings(family: Family | None, rule: Rule, plan: Plan | None, trials: Sequence[Trial]) -> str:
    if family is None or family.profile is None or plan is None:
        return ""
    profile, recursion = family.profile, Recursion(family.profile, rule)
    lines = [finding("differs", "Different text", text) for text in drifts(trials)]
    if not plan.levels:
        lines += without_stack(family, rule, plan, trials)
    elif text := slower(recursion, plan, rule, trials):
        better = best_plan(family, rule, plan, recursion)
        lines.append(finding("differs", "Slower than plain", text + better))
    else:
        gain = profile.target.seconds(0) / recursion.latency(plan)
        text = f"{plan} is predicted to decode {times(gain)} as fast as plain decoding."
        lines.append(finding("same", "Draft models are worth it", text))
    return "".join(lines)


def without_stack(family: Family, rule: Rule, plan: Plan, trials: Sequence[Trial]) -> Iterator[str]:
    """Why no draft model is used: the time that each would take alone, and the reasons for it."""
    profile, recursion = family.profiled(), Recursion(family.profiled(), rule)
    drafting = f"the {NAMES[plan.source]} alone" if plan.source else "plain decoding"
    text = f"{drafting}: {per_token(recursion.latency(plan))} per token, predicted."
    if better := best_plan(family, rule, plan, recursion):
        yield finding("", "No draft model is used", text + better)
        return
    yield finding("", "No draft model is worth it here", text)
    for single in singles(profile, rule).values():
        seconds = per_token(recursion.latency(single))
        if text := slower(recursion, single, rule, trials):
            yield finding("", "Slower than plain", text)
        elif plan.source:
            title = f"Predicted slower than the {NAMES[plan.source]}"
            yield finding("", title, f"{single}, {seconds} per token.")


def best_plan(family: Family, rule: Rule, plan: Plan, recursion: Recursion) -> str:
    best = family.plan("", rule)
    if best == plan:
        return ""
    return f" Predicted to be fastest: {best}, {per_token(recursion.latency(best))}."


def slower(recursion: Recursion, plan: Plan, rule: Rule, trials: Sequence[Trial]) -> str:
    """Why a plan is slower than plain decoding, as measured or else as predicted; empty if it is
    faster.

    Measured times are compared with each other only, because the machine may have been slower than
    during the profile.
    """
    plain, predicted = recursion.profile.target.seconds(0), recursion.latency(plan)
    measured = {trial.title: trial.seconds for trial in trials}
    took = measured.get(str(plan))
    if took is None:
        text = f"{plan} is predicted to take {per_token(predicted)} per token, plain decoding "
        text += f"{per_token(plain)}."
        slow = predicted >= plain
    else:
        alone = trials[0].seconds
        text = f"{plan} took {per_token(took)} per token, plain decoding {per_token(alone)}."
        slow = took >= alone
    if not slow:
        return ""
    if predicted < plain:
        return (
            f"{text} The prediction was {per_token(predicted)} and {per_token(plain)}. The "
            "profile was measured on other text or under another load. Profile again."
        )
    return " ".join([text, *reasons(recursion, plan, rule)])


def drifts(trials: Sequence[Trial]) -> list[str]:
    return [
        f"{trial.title} differed from plain decoding at token "
        f"{trial.verdict.position:,} ({trial.verdict.accelerated!r}, not {trial.verdict.plain!r}). "
        "In reduced precision, rounding can decide between two tokens that are almost equally "
        "likely. Load the models in float32 to be sure."
        for trial in trials
        if trial.same_text and not trial.verdict.identical
    ]


def outcome(trials: Sequence[Trial]) -> str:
    checked = [trial for trial in trials[1:] if trial.same_text]
    return template(
        "stack_outcome.html",
        trials=trials,
        fastest=max(trials, key=lambda trial: trial.speedup.whole or 0.0, default=None),
        checked=checked,
        same=sum(trial.verdict.identical for trial in checked),
        per_token=per_token,
    )
