"""Prediction layers in the weight files of a model, by the names of their tensors.

transformers leaves them out when it loads a model. Two ways to name them are in use:

- "shared" (Qwen 3.5, Qwen3-Next, EXAONE MoE): `mtp.fc`, two norms before it and one behind, which
  all layers share, and the layers as `mtp.layers.k`.
- "apart" (DeepSeek V3, GLM 4.5): each layer stands behind those of the model, with norms and a
  projection of its own.

Nothing of a file but its header is needed, and no torch.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ANY = re.compile(r"(?:^|[._])mtp(?:[._]|$)")
SHARED = re.compile(r"^(?:model\.)?mtp\.(.+)$")
LAYER = re.compile(r"^(.*?)\blayers\.(\d+)\.(.+)$")
JOINTS = {
    "fc.weight": "fc",
    "pre_fc_norm_embedding.weight": "embedding",
    "pre_fc_norm_hidden.weight": "hidden",
    "norm.weight": "norm",
    "eh_proj.weight": "fc",
    "enorm.weight": "embedding",
    "hnorm.weight": "hidden",
    "shared_head.norm.weight": "norm",
}
"""What stands around a layer, by its names in both ways."""
NEEDED = frozenset(JOINTS.values())
BORROWED = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the model's own embedding and output matrix, which some files store once more."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction layers of a model. `joints[k]` are the tensors around layer k by their part,
    `layers[k]` those in it by their name in a layer. `names` are all that belong to them, copies of
    the model's matrices included."""

    joints: tuple[Mapping[str, str], ...]
    layers: tuple[Mapping[str, str], ...]
    names: frozenset[str]

    @property
    def shared(self) -> bool:
        """Whether all layers have the same joint."""
        return all(each is self.joints[0] for each in self.joints)

    @property
    def problem(self) -> str:
        """What keeps them from being used, "" for nothing."""
        if not self.layers:
            return f"their tensors have names that are not known here ({min(self.names)}, ...)"
        for number, (joint, layer) in enumerate(zip(self.joints, self.layers, strict=True)):
            if missing := sorted(NEEDED - joint.keys()):
                known = (name for name, part in JOINTS.items() if part == missing[0])
                return f"layer {number} has no tensor {' or '.join(known)}"
            if not layer:
                return f"layer {number} has no tensors of its own"
        return ""


def prediction(names: Iterable[str], layers: int) -> Prediction | None:
    """The prediction layers among the tensors of a model with so many layers, None where there are
    none. Where their way of naming is not known it has `names` alone."""
    stored = list(names)
    shared, inside, own = of_shared(stored)
    around: dict[int, dict[str, str]] = {}
    if not shared:
        around, inside, own = of_apart(stored, layers)
    own |= {name for name in stored if ANY.search(name)}
    if not own:
        return None
    count = 1 + max((*around, *inside), default=0) if shared or around else 0
    numbers = range(count)
    return Prediction(
        tuple(shared or around.get(number, {}) for number in numbers),
        tuple(inside.get(number, {}) for number in numbers),
        frozenset(own),
    )


Numbered = dict[int, dict[str, str]]
"""By the number of a layer, tensors by what they are in it."""


def of_shared(names: Iterable[str]) -> tuple[dict[str, str], Numbered, set[str]]:
    """What all layers share, what is in each, and all names of these."""
    shared: dict[str, str] = {}
    inside: Numbered = {}
    for name in names:
        rest = found[1] if (found := SHARED.match(name)) else ""
        if rest in JOINTS:
            shared[JOINTS[rest]] = name
        elif layer := LAYER.match(rest):
            inside.setdefault(int(layer[2]), {})[layer[3]] = name
    return (
        shared,
        inside,
        {*shared.values(), *(each for one in inside.values() for each in one.values())},
    )


def of_apart(names: Iterable[str], layers: int) -> tuple[Numbered, Numbered, set[str]]:
    """What is around each layer, what is in it, and all names of these.

    A layer behind the model's is one of these where one of them in the same place has a projection:
    parts of a model that see pictures number their layers, too.
    """
    found = [(name, layer) for name in names if (layer := LAYER.match(name))]
    behind = [(name, layer) for name, layer in found if int(layer[2]) >= layers]
    places = {layer[1] for _, layer in behind if JOINTS.get(layer[3]) == "fc"}
    around: Numbered = {}
    inside: Numbered = {}
    own = set()
    for name, layer in behind:
        if layer[1] in places:
            own.add(name)
            number, rest = int(layer[2]) - layers, layer[3]
            if rest in JOINTS:
                around.setdefault(number, {})[JOINTS[rest]] = name
            elif rest not in BORROWED:
                inside.setdefault(number, {})[rest] = name
    return around, inside, own
