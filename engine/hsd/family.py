"""A target, the draft models that are loaded for it, and what was measured of them together."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from engine.backends.base import Backend, BackendInfo
from engine.decode import never
from engine.drafting.base import Drafter
from engine.drafting.costs import CostCurve
from engine.errors import ModelError, SettingError
from engine.hsd.planner import DATABASES, HEAD, Plan, Recursion, best, resolve
from engine.hsd.profile import Profile
from engine.hsd.stack import LevelDrafter, Stack
from engine.hsd.vocabulary import check_vocabulary
from engine.settings import Sampling
from engine.types import Rule
from engine.verify import verifier

UNABLE = "it cannot roll back."


class Described(Protocol):
    """A model as far as planning has to know it."""

    @property
    def info(self) -> BackendInfo:
        """What it is."""


Model = TypeVar("Model", bound=Described)


class Plans(Generic[Model]):
    """What can be planned with draft models, by name, the smallest first.

    `profile` is None until the models were profiled; nothing can be planned before.
    """

    def __init__(
        self, target: Model, drafts: Mapping[str, Model], profile: Profile | None = None
    ) -> None:
        self.target, self.profile = target, profile
        self.drafts = dict(sorted(drafts.items(), key=lambda item: item[1].info.parameters))
        self.plans: dict[tuple[str, Rule], Plan] = {}

    def profiled(self) -> Profile:
        """The profile. Raises SettingError when there is none."""
        if self.profile is None:
            names = ", ".join(self.drafts) or "none"
            raise SettingError(
                f"The draft models ({names}) were not profiled with {self.target.info.name} and "
                "this sampler. Profile them in the Stack tab, or choose another method."
            )
        return self.profile

    def plan(self, spec: str, rule: Rule) -> Plan:
        """The plan of that text (engine/hsd/planner.py), the best one for an empty text."""
        profile, key = self.profiled(), (spec, rule)
        if key not in self.plans:
            allowed = [*self.drafts, DATABASES, HEAD]
            self.plans[key] = resolve(profile, spec, rule) if spec else best(profile, rule, allowed)
        return self.plans[key]

    def check(self, plan: Plan) -> None:
        """Raise SettingError unless every model of the plan is loaded."""
        for level in plan.levels:
            if level.model not in self.drafts:
                raise SettingError(
                    f"The draft model {level.model!r} of the plan {plan} is not loaded. Loaded: "
                    f"{', '.join(self.drafts) or 'none'}. Load it in the Stack tab."
                )


class Family(Plans[Backend]):
    """The loaded models themselves. `samplings` holds the sampler of every draft that has one of
    its own. Raises ModelError for a model that cannot draft for the target.
    """

    def __init__(
        self,
        target: Backend,
        drafts: Mapping[str, Backend],
        profile: Profile | None = None,
        samplings: Mapping[str, Sampling] | None = None,
    ) -> None:
        if target.info.name in drafts:
            raise ModelError(
                f"A draft model cannot be called {target.info.name!r}: the target is. Rename its "
                "folder, or make a link of another name."
            )
        for name, draft in drafts.items():
            check_drafts(target, name, draft)
        super().__init__(target, drafts, profile)
        self.samplings = samplings or {}
        sizes = [model.info.vocabulary_size for model in (target, *drafts.values())]
        self.vocabulary = min(sizes)

    def sampling_of(self, model: str, sampling: Sampling) -> Sampling:
        """How a draft model draws in a run with that sampling: with the run's seed."""
        return replace(self.samplings.get(model, sampling), seed=sampling.seed)

    def stack(
        self,
        plan: Plan,
        sampling: Sampling,
        rule: Rule,
        below: Drafter | None,
        cancelled: Callable[[], bool] = never,
    ) -> Stack:
        """The drafter of a plan with at least one level; `below` drafts for the smallest model.

        `cancelled` is that of the run it is for. Raises SettingError for a model that is not
        loaded.
        """
        profile, drafter = self.profiled(), below
        self.check(plan)
        for number, level in enumerate(plan.levels, start=1):
            costs = profile.models[profile.index(level.model)].costs
            top = drafter = LevelDrafter(
                level.model,
                self.drafts[level.model],
                level.batch,
                self.sampling_of(level.model, sampling),
                verifier(rule, sampling.seed, number, self.vocabulary),
                self.vocabulary,
                drafter,
                CostCurve(costs),
                cancelled,
            )
        recursion = Recursion(profile, rule)
        emits, _ = recursion.round(plan, len(profile.models) - 1)
        tokens = float(sum(tokens * share for tokens, share in enumerate(emits)))
        return Stack(top, tokens, recursion.handed(plan)[1])


def check_drafts(target: Backend, name: str, draft: Backend) -> None:
    """Raise ModelError unless a model can draft for the target."""
    if not target.info.can_tree:
        raise ModelError(
            f"{target.info.name} cannot verify drafts: {target.info.note or UNABLE} Choose another "
            "model to answer, or do without draft models."
        )
    if not draft.info.can_tree:
        raise ModelError(
            f"{name} cannot draft: {draft.info.note or UNABLE} Choose a model that can, or leave "
            "it out."
        )
    check_vocabulary(target, draft)
