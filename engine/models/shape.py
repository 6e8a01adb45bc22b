"""The shape of a Llama-like model, and which model can be written into which larger shape."""

from dataclasses import asdict, dataclass, fields
from math import log2
from typing import Any

from engine.errors import SettingError

LARGEST = 65_536
"""The largest number of a shape. A larger one is a typing error that torch would not report."""

Config = Any
Model = Any
"""A configuration and a model of the transformers library, whose attributes depend on the model."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a Llama-like model; the head size and the vocabulary are the original's."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int

    def parameters(self, vocabulary: int, head_size: int) -> int:
        attention = 2 * head_size * (self.heads + self.kv_heads)
        layer = self.hidden * (attention + 3 * self.intermediate + 2)
        return vocabulary * self.hidden + self.layers * layer + self.hidden

    def head_parameters(self, head_size: int) -> int:
        """Those of an EAGLE-3 head of this size, which uses the model's embedding and output
        matrix."""
        attention = head_size * (3 * self.heads + 4 * self.kv_heads)
        return self.hidden * (3 * self.hidden + attention + 3 * self.intermediate + 4)

    @classmethod
    def of(cls, config: Config) -> "Shape":
        return cls(
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.num_hidden_layers,
        )

    @classmethod
    def read(cls, text: str) -> "Shape":
        """The shape of a text like "512,1408,8,2,12". Raises SettingError for any other text."""
        names = [item.name for item in fields(cls)]
        try:
            sizes = [int(size) for size in text.split(",")]
        except ValueError:
            sizes = []
        if len(sizes) != len(names) or min(sizes) < 1 or max(sizes) > LARGEST:
            raise SettingError(
                f"There is no shape {text!r}. Give {','.join(names).upper()}: {len(names)} whole "
                f"numbers from 1 to {LARGEST} with commas between."
            )
        return cls(*sizes)


SHAPES = {
    "0.1b": Shape(1024, 1664, 16, 4, 12),
    "0.25b": Shape(1024, 4096, 16, 4, 16),
    "0.5b": Shape(1024, 5888, 16, 4, 24),
    "1b": Shape(1024, 11776, 32, 8, 24),
    "3b": Shape(4096, 6912, 32, 8, 28),
    "7b": Shape(4096, 11008, 64, 64, 32),
}
"""For a hidden size of 256 and heads of 64. The last is Llama 2 7B except for its vocabulary."""


def check_fits(config: Config, shape: Shape) -> None:
    """Raise SettingError unless a model of this config can be written into that shape."""
    kind = config.model_type
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        kind += " with biases"
    if getattr(config, "quantization_config", None):
        kind += ", quantized"
    if kind != "llama":
        raise SettingError(
            f"A model of type {kind!r} cannot be inflated. Choose one of type 'llama' (RMSNorm, "
            "gated MLP), neither with biases nor quantized."
        )
    old = Shape.of(config)
    ratio = shape.hidden / old.hidden
    if ratio < 1 or ratio != 4 ** round(log2(ratio) / 2):
        raise SettingError(
            f"A hidden size of {old.hidden} cannot become {shape.hidden}. The factor has to be a "
            "power of four, or the norms would round differently."
        )
    if shape.hidden % shape.heads:
        raise SettingError(
            f"{shape.heads} heads do not divide a hidden size of {shape.hidden}, which the library "
            "asks for. Give a divisor."
        )
    for name, size in asdict(old).items():
        if getattr(shape, name) < size:
            raise SettingError(
                f"The model has {name} {size}, and {getattr(shape, name)} is less. Choose a "
                "larger size."
            )
    wide, group = shape.heads // shape.kv_heads, old.heads // old.kv_heads
    if shape.heads % shape.kv_heads or wide < group:
        raise SettingError(
            f"{shape.heads} heads on {shape.kv_heads} kv heads leave no place for the model's "
            f"{group} heads per kv head. Give a multiple of the kv heads, at least {group} each."
        )
