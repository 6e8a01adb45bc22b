"""Which tensors of a model are its prediction layers, by their names alone."""

import pytest

from engine.models.prediction_layers import prediction

MODEL = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
AROUND = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
APART = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
PARTS = {"fc", "embedding", "hidden", "norm"}


@pytest.mark.parametrize("place", ["mtp", "model.mtp"])
def test_layers_that_share_what_is_around_them(place: str) -> None:
    own = [f"{place}.{name}.weight" for name in AROUND]
    own += [f"{place}.layers.{number}.mlp.up_proj.weight" for number in (0, 1)]
    found = prediction([*MODEL, *own], layers=1)
    assert found is not None and found.names == set(own) and not found.problem
    assert found.shared and found.joints[0].keys() == PARTS
    assert [dict(each) for each in found.layers] == [
        {"mlp.up_proj.weight": f"{place}.layers.{number}.mlp.up_proj.weight"} for number in (0, 1)
    ]


def test_layers_behind_those_of_the_model() -> None:
    own = [
        f"model.layers.{number}.{name}.weight"
        for number in (2, 3)
        for name in (*APART, "mlp.up_proj", "embed_tokens", "shared_head.head")
    ]
    # Another part of the model has more layers than the part that writes.
    seeing = [f"vision.layers.{number}.mlp.up_proj.weight" for number in range(5)]
    found = prediction([*MODEL, *own, *seeing], layers=2)
    assert found is not None and found.names == set(own) and not found.problem
    assert not found.shared and [each.keys() for each in found.joints] == [PARTS, PARTS]
    assert [set(each) for each in found.layers] == [{"mlp.up_proj.weight"}] * 2


def test_models_without_any() -> None:
    assert prediction(MODEL, layers=1) is None
    assert prediction([*MODEL, "model.layers.1.mlp.up_proj.weight", "smtp.weight"], 1) is None


def test_what_is_missing_or_not_known_is_said() -> None:
    own = [f"mtp.{name}.weight" for name in AROUND] + ["mtp.layers.0.mlp.up_proj.weight"]
    for name in own:
        found = prediction([each for each in own if each != name], layers=1)
        assert found is not None
        assert (
            name.removeprefix("mtp.") in found.problem or "no tensors of its own" in found.problem
        )
    found = prediction([*MODEL, "model.mtp_layers.0.input_proj.weight"], layers=1)
    assert found is not None and "(model.mtp_layers.0.input_proj.weight, ...)" in found.problem
