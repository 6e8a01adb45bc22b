"""The memory that a model will need before any of it is loaded, and the free memory on its device.

The headers of the weight files give the parameters, the config gives the cache. Nothing else of the
files is read, so a model that does not fit is refused in milliseconds.

Prediction layers, which transformers leaves out when it loads a model, are found by the names of
their tensors. Two naming schemes are in use:

- "shared" (Qwen 3.5, Qwen3-Next, EXAONE MoE): `mtp.fc`, two norms before it and one after, which
  all layers share, and the layers as `mtp.layers.k`.
- "apart" (DeepSeek V3, GLM 4.5): each layer follows those of the model, with its own norms and
  projection.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from engine.drafting.costs import LARGEST
from engine.errors import ModelError, first_line
from engine.machine import computes_bfloat16
from engine.models.quantised_files import KEEPS, ROUNDED, Matrix, kept_form, matrices

if TYPE_CHECKING:
    from huggingface_hub.utils import TensorInfo  # type: ignore[attr-defined]

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
"""The tensors around a layer, by their names in both schemes."""
NEEDED = frozenset(JOINTS.values())
BORROWED = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the model's own embedding and output matrix, which some files store once more."""


Numbered = dict[int, dict[str, str]]
"""The names of tensors, by the number of their layer and their part in it."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction layers of a model. `joints[k]` are the tensors around layer k by their part,
    `layers[k]` those in it by their name in a layer. `names` are all of their tensors, including
    copies of the model's matrices."""

    joints: tuple[Mapping[str, str], ...]
    layers: tuple[Mapping[str, str], ...]
    names: frozenset[str]

    @property
    def shared(self) -> bool:
        return all(each is self.joints[0] for each in self.joints)

    @property
    def problem(self) -> str:
        """Why the layers cannot be used; "" if they can."""
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
    """The prediction layers among the tensors of a model with `layers` layers, None without any. If
    their naming scheme is unknown, the result has only `names`."""
    stored = list(names)
    own = {name for name in stored if ANY.search(name)}
    shared, inside = shared_layers(stored)
    around: Numbered = {}
    if not shared:
        around, inside, more = apart_layers(stored, layers)
        own |= more
    if not own:
        return None
    numbers = range(1 + max((*around, *inside), default=0) if shared or around else 0)
    return Prediction(
        tuple(shared or around.get(number, {}) for number in numbers),
        tuple(inside.get(number, {}) for number in numbers),
        frozenset(own),
    )


def shared_layers(names: Iterable[str]) -> tuple[dict[str, str], Numbered]:
    shared: dict[str, str] = {}
    inside: Numbered = {}
    for name in names:
        rest = found[1] if (found := SHARED.match(name)) else ""
        if rest in JOINTS:
            shared[JOINTS[rest]] = name
        elif layer := LAYER.match(rest):
            inside.setdefault(int(layer[2]), {})[layer[3]] = name
    return shared, inside


def apart_layers(names: Iterable[str], layers: int) -> tuple[Numbered, Numbered, set[str]]:
    """The tensors around each layer, those in it, and the names of all of them. A layer after those
    of the model counts if a layer in the same place has a projection, because the vision parts of a
    model number their layers, too."""
    found = [(name, layer) for name in names if (layer := LAYER.match(name))]
    later = [(name, layer) for name, layer in found if int(layer[2]) >= layers]
    places = {layer[1] for _, layer in later if JOINTS.get(layer[3]) == "fc"}
    around: Numbered = {}
    inside: Numbered = {}
    own = set()
    for name, layer in later:
        if layer[1] in places:
            own.add(name)
            number, rest = int(layer[2]) - layers, layer[3]
            if rest in JOINTS:
                around.setdefault(number, {})[JOINTS[rest]] = name
            elif rest not in BORROWED:
                inside.setdefault(number, {})[rest] = name
    return around, inside, own


SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "U32": 4, "U16": 2}
"""Bytes of a number in a weight file; types that are not listed take one byte."""
FLOATING = ("F", "BF")
"""How the names of types in floating point begin."""
KEEPING = (
    "k_proj.weight", "v_proj.weight", "kv_b_proj.weight", "fc.weight", "eh_proj.weight",
    "post_projection.weight",
)  # fmt: skip
"""The ends of the names of tensors whose outputs a head keeps for each token."""
AHEAD = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""The keys in config.json that give the number of prediction layers."""
DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
CHAIN = 16
"""The most levels of a chain for which the state after each level is kept."""
MARKS = 3
KEPT = 1 + MARKS + CHAIN + 1
"""The most states of a layer: the current one, marks, and one for each row of a chain, including
its root."""
PACKED_INPUTS, PACKED_GROUP = 32, 128
"""The inputs of a matrix of few bits are a multiple of the first, and padded to one of the
second."""
PACKED_SCALES = {8: (128, 4), 4: (32, 2)}
"""By bits, the weights that share a scale, and its bytes."""
RECORDINGS = 190_000_000
"""What captured forwards took on an H200 beside weights and cache: two workspaces of the library
for products, 34 MB each, and what the recordings share."""
HALF = 2
"""The bytes of a scale, and of a zero, on a GPU (engine/backends/rounded.py)."""
EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|embedding)\.weight$")
PACKED_OUTPUTS = 16
"""Outputs of such a matrix that lie together; it is padded to whole numbers of them."""
HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output)\.weight$")
ROUTER = re.compile(r"\.(?:gate|router)\.weight$")
EXPERTS = ".experts."
ACTIVATIONS = ("hidden_act", "mlp_hidden_act", "hidden_activation")
ODD_EXPERTS = {"deepseek_v4", "gpt_oss", "llama4_text"}
"""Types of models whose experts have more than SiLU gates, so that they stay as they are."""
FLOAT32 = 4
"""Recurrences are computed and kept in float32, whatever the weights are."""
STATE, BOTH, ATTENTION = "state", "both", "attention"
STATES = {"linear_attention", "conv", "mamba", "mamba2"}
HYBRIDS = {"hybrid", "parallel", "hybrid_sliding"}
PATTERN = {"M": STATE, "*": ATTENTION}
"""The letters of Nemotron's patterns; other layers have neither attention nor a state."""
PURE = {"mamba", "mamba2", "falcon_mamba"}
PARALLEL = {"falcon_h1"}
"""Types of models whose layers all keep a state, without and with attention."""


@dataclass(frozen=True, slots=True)
class DraftingForecast:
    """How a model will draft. With `chains`, drafts are chains instead of trees. `head` describes
    the head and its place in words; without one, `problem` may give the reason."""

    chains: bool = False
    head: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Need:
    """The size of a model: its parameters, and the bytes of its weights and of its cache.

    `cache` is that of the conversations that are answered at once, with full contexts, and what
    captured forwards need, which is `shared`. The caches of other open conversations are
    additional, and limited by engine/loaded.py. `forecast` describes what will draft for the model,
    as far as the same files show.
    """

    parameters: int
    weights: int
    cache: int
    forecast: DraftingForecast | None = field(default=None, compare=False)
    shared: int = 0

    @property
    def each(self) -> int:
        """What one more answer at once would need."""
        return self.cache - self.shared

    @property
    def total(self) -> int:
        return self.weights + self.cache

    def of(self, answers: int) -> "Need":
        """The need if so many answers are decoded at once, each with a cache of its own."""
        return replace(self, cache=self.shared + self.each * max(1, answers))


class Loading(NamedTuple):
    """How the weights of a model with this config are loaded: numbers in floating point as `kind`,
    None for the type of the files, and matrices with at most `few` bits, 0 for all of them."""

    config: Mapping[str, Any]
    on_cpu: bool
    kind: str | None
    few: int

    @property
    def tied(self) -> bool:
        return bool(self.config.get("tie_word_embeddings"))

    def bytes_of(self, name: str, tensor: "TensorInfo") -> int:
        """The bytes of a tensor (engine/backends/quantised.py). Next to matrices of few bits, what
        is no matrix becomes float32 on a processor, and an embedding keeps its type."""
        count, shape = tensor.parameter_count, list(tensor.shape)
        if not self.few or not tensor.dtype.startswith(FLOATING):
            return self.as_stored(tensor)
        number = SIZES.get(tensor.dtype if self.on_cpu else str(self.kind), 1)
        whole = count * (FLOAT32 if self.on_cpu else number)
        if self.stays(name, tensor):
            return whole
        if EXPERTS in name and len(shape) == 3:
            shape = [shape[0] * shape[1], shape[2]]
        embedding = EMBEDDING.search(name) is not None
        packed = self.packed_bytes(shape, 8 if embedding or HEAD.search(name) else self.few)
        if embedding:
            # It is the output matrix as well if it is tied.
            return count * number + (packed or 0) * self.tied
        return whole if packed is None else packed

    def as_stored(self, tensor: "TensorInfo") -> int:
        """The bytes of a tensor whose numbers do not get few bits."""
        floating = tensor.dtype.startswith(FLOATING)
        kind = self.kind if self.kind and floating else tensor.dtype
        return tensor.parameter_count * SIZES.get(kind, 1)

    def packed_bytes(self, shape: Sequence[int], bits: int) -> int | None:
        """The bytes of a matrix of few bits, None for what cannot be one."""
        if len(shape) != 2:
            return None
        if not self.on_cpu:
            return rounded_size(shape, bits)
        if shape[0] < PACKED_OUTPUTS or shape[1] % PACKED_INPUTS:
            return None
        return packed_size(shape, bits, *PACKED_SCALES[bits])

    def stays(self, name: str, weight: "TensorInfo") -> bool:
        """Whether a tensor is not converted because it belongs to a router, or to experts that the
        core does not compute."""
        if EXPERTS not in name:
            return ROUTER.search(name) is not None
        if not self.on_cpu or self.config.get("model_type") in ODD_EXPERTS:
            return True
        given = (self.config[key] for key in ACTIVATIONS if self.config.get(key))
        uneven = any(size % PACKED_INPUTS for size in weight.shape[-2:])
        return uneven or next(given, "silu") != "silu"


def loading_of(config: Mapping[str, Any], device: str, dtype: str, few: int) -> Loading:
    """How a model is loaded. On a processor "auto" is bfloat16 if the files have that and the
    processor computes with it, otherwise float32; elsewhere it is the type of the files. Next to
    matrices of few bits a GPU needs a type of 16 bits."""
    on_cpu, kind = device.startswith("cpu"), DTYPES.get(dtype)
    if dtype == "auto":
        kind = DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")))
        if on_cpu and not (kind == "BF16" and computes_bfloat16()):
            kind = "F32"
    if few:
        halves = (each for each in (DTYPES.get(dtype), kind) if each in ("BF16", "F16"))
        kind = "F32" if on_cpu else next(halves, "BF16")
    return Loading(config, on_cpu, kind, few)


def memory_need(
    source: str,
    device: str,
    dtype: str,
    context_length: int,
    head: Path | None = None,
    ahead: bool = True,
    bits: str = "auto",
) -> Need:
    """The need of a model in a folder or in the hub's cache, in the `dtype` it would be loaded in.

    `dtype` and `bits` are as for `load_transformers`. `head` is the folder of the head that is
    loaded with the model; with `ahead` its prediction layers are loaded, if it has any. Raises
    ModelError for a source that is not a model, or not on this machine.
    """
    folder = folder_of(source)
    config = config_of(source, folder)
    with reading(source, "its config.json does not tell how it was quantised"):
        form = kept_form(config, device, bits)
    loading = loading_of(
        config, device, dtype, int(bits) if bits.isdigit() else KEEPS if form else 0
    )
    listed = tensors(source, folder)
    layers = config.get("num_hidden_layers")
    found = prediction(listed, layers if isinstance(layers, int) else len(listed))
    parts = (*found.joints, *found.layers) if found and ahead and not found.problem else ()
    own = {name: listed[name] for part in parts for name in part.values()}
    stored: dict[str, Matrix] = {}
    if form:
        with reading(source, "its quantised matrices are not known"):
            stored = matrices(form, listed, found.names if found else ())
    parameters = sum(matrix.outputs * matrix.inputs for matrix in stored.values())
    weights = sum(stored_bytes(name, matrix, loading) for name, matrix in stored.items())
    left = {name for matrix in stored.values() for name in matrix.tensors.values()}
    left |= found.names if found else set()
    if loading.few and loading.tied and any(map(EMBEDDING.search, listed)):
        # A tied output matrix may be stored as well; it is counted with the embedding.
        left |= set(filter(HEAD.search, listed))
    for name in listed.keys() - left:
        weights += loading.bytes_of(name, listed[name])
    weights += sum(map(loading.as_stored, own.values()))
    parameters += sum(listed[name].parameter_count for name in listed.keys() - left | own.keys())
    number = SIZES[loading.kind or "BF16"]
    with reading(source, "its config.json does not tell its sizes"):
        context_length = min(context_length, longest(config, context_length))
        cache = cache_numbers(config, context_length) * number
    with reading(source, "its config.json does not tell its states"):
        cache += state_bytes(config)
    cache += kept(own) * context_length * number
    if head is not None:
        numbers, row = head_numbers(head)
        weights, cache = weights + numbers * number, cache + row * context_length * number
    shared = RECORDINGS if device.startswith("cuda") else 0
    return Need(parameters, weights, cache + shared, forecast_of(config, folder, found), shared)


def stored_bytes(place: str, matrix: Matrix, loading: Loading) -> int:
    """The bytes of a matrix that the files have in few bits."""
    bits = min(matrix.bits, 8 if HEAD.search(f"{place}.weight") else loading.few)
    shape, kept = (matrix.outputs, matrix.inputs), bits == matrix.bits
    if not loading.on_cpu:
        more = (matrix.rounded, HALF << matrix.lows) if kept else ()
        return rounded_size(shape, bits, *more)
    together, scale = PACKED_SCALES[bits]
    if kept and matrix.fine:
        together, scale = PACKED_INPUTS, HALF << matrix.lows
    return packed_size(shape, bits, together, scale)


def rounded_size(
    shape: Sequence[int], bits: int, together: int = ROUNDED, scale: int = HALF
) -> int:
    """The bytes of a matrix of few bits on a GPU, of which so many weights together have scales and
    zeros of so many bytes."""
    padded = shape[0] * -(-shape[1] // (2 * together)) * 2 * together
    return padded * bits // 8 + padded // together * scale


def packed_size(shape: Sequence[int], bits: int, together: int, scale: int) -> int:
    """The bytes of a padded matrix, of which so many weights together have scales of so many
    bytes."""
    outputs, inputs = shape
    padded = -(-outputs // PACKED_OUTPUTS) * PACKED_OUTPUTS
    padded *= -(-inputs // PACKED_GROUP) * PACKED_GROUP
    return padded * bits // 8 + padded // together * scale


def kept(tensors: Mapping[str, "TensorInfo"]) -> int:
    """The numbers that a head of these tensors keeps per token: a hidden state, a key and a value
    of each layer."""
    found = (each.shape for name, each in tensors.items() if name.endswith(KEEPING))
    return sum(shape[0] for shape in found if shape)


def folder_of(source: str) -> Path:
    """The folder of a model: the source itself, or the folder of its config in the hub's cache."""
    folder = Path(os.path.expanduser(source))
    if folder.is_dir():
        return folder
    from huggingface_hub import hf_hub_download

    from engine.models.hub import cached, check_reachable

    try:
        check_reachable(source)
        found = cached(source, "config.json") or hf_hub_download(source, "config.json")
    except Exception as error:
        # The hub's client raises many types: no such id, no network, no permission.
        raise ModelError(
            f"The model {source!r} cannot be found: there is no such folder, and the Hugging Face "
            f"hub does not give it ({first_line(error)}). Give a folder that holds config.json, a "
            "tokenizer and *.safetensors files, or the id of a model on the hub."
        ) from error
    return Path(found).parent


@contextmanager
def reading(source: str, problem: str) -> Iterator[None]:
    """Turn any exception because of a damaged file into a ModelError."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise unreadable(source, f"{problem} ({first_line(error)})") from error


def config_of(source: str, folder: Path) -> Mapping[str, Any]:
    with reading(source, "its config.json cannot be read"):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return {**config, **config.get("text_config", config)}


def longest(config: Mapping[str, Any], default: int) -> int:
    """The longest context that a model can read, by its config."""
    return whole(config, "max_position_embeddings", "n_positions", default=default)


def cache_numbers(config: Mapping[str, Any], context_length: int) -> int:
    """The keys and values of a full context: layers that have attention x 2 x heads x size of a
    head x rows."""
    layers, _ = layers_of(config)
    if not layers:
        return 0
    heads = whole(config, "num_attention_heads", "n_head")
    hidden = whole(config, "hidden_size", "n_embd")
    key_heads = whole(config, "num_key_value_heads", default=heads)
    size = whole(config, "head_dim", default=hidden // heads)
    # After the context there is room for the largest draft tree and its root.
    return layers * 2 * key_heads * size * (context_length + LARGEST + 1)


def tensors(source: str, folder: Path) -> dict[str, "TensorInfo"]:
    """Every tensor of the weight files. If these are not downloaded yet, only their headers are
    fetched from the hub."""
    from huggingface_hub import get_safetensors_metadata, parse_local_safetensors_file_metadata

    files: list[Any] = []
    for path in weight_files(source, folder):
        with reading(source, f"{path.name} is no sound safetensors file"):
            files.append(parse_local_safetensors_file_metadata(path))
    if not files and folder == Path(os.path.expanduser(source)):
        raise unreadable(source, "it holds no *.safetensors files")
    if not files:
        with reading(source, "the hub gives no weights"):
            files += get_safetensors_metadata(source).files_metadata.values()
    return {name: each for file in files for name, each in file.tensors.items()}


def head_numbers(folder: Path) -> tuple[int, int]:
    """The numbers in the weights of a head, and those that it keeps per token: a hidden state, a
    key and a value. Zeros if it cannot be read."""
    from huggingface_hub import parse_local_safetensors_file_metadata

    found: dict[str, TensorInfo] = {}
    for path in folder.glob("*.safetensors"):
        try:
            found |= parse_local_safetensors_file_metadata(path).tensors
        except Exception:
            # The library raises various types for damaged headers.
            return 0, 0
    return sum(each.parameter_count for each in found.values()), kept(found)


def weight_files(source: str, folder: Path) -> Sequence[Path]:
    """The files that would be loaded: those of the index, or the single file, or else all."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with reading(source, f"its {index.name} cannot be read"):
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return [folder / Path(name).name for name in sorted(set(names))]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    return sorted(folder.glob("*.safetensors"))


def unreadable(source: str, problem: str) -> ModelError:
    return ModelError(
        f"The model {source!r} cannot be used: {problem}. Give a folder that holds config.json, a "
        "tokenizer and *.safetensors files."
    )


def forecast_of(
    config: Mapping[str, Any], folder: Path, found: Prediction | None = None
) -> DraftingForecast:
    """What will draft for the model in a folder, by its config.json and the prediction layers
    `found` in its weight files."""
    chains = False
    with suppress(KeyError, TypeError, ValueError):  # errors in sizes are reported elsewhere
        chains = layers_of(config)[1] > 0
    if (folder / "head" / "config.json").is_file():
        return DraftingForecast(chains, "in its folder head")
    if found:
        problem = f"its prediction layers cannot be used: {found.problem}" if found.problem else ""
        return DraftingForecast(chains, "" if problem else "MTP, in its files", problem)
    ahead = any(config.get(name) for name in AHEAD)
    lacking = "its config names a prediction layer, and its weight files do not hold it"
    return DraftingForecast(chains, problem=lacking if ahead else "")


# States of recurrent layers. The size of a state does not depend on the length of the text, but
# several are kept: that of the text, marks to go back to, and one for each row of a verified chain
# (engine/backends/caches.py). Model families have different names for the same sizes.


def layers_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """How many layers of a model have attention, and how many keep a state. If the config names no
    kinds, all have attention. Raises KeyError, TypeError or ValueError."""
    listed = config.get("layer_types") or config.get("layers_block_type") or ()
    count = len(listed) or whole(config, "num_hidden_layers", "n_layer")
    model = config.get("model_type")
    if model in PURE:
        return 0, count
    if model in PARALLEL:
        return count, count
    kinds = [kind_of(str(kind)) for kind in listed] or kinds_of(config, count)
    attention = sum(kind in (ATTENTION, BOTH) for kind in kinds)
    return attention, sum(kind in (STATE, BOTH) for kind in kinds)


def kinds_of(config: Mapping[str, Any], count: int) -> Sequence[str]:
    """The kind of each layer if the config does not list them: STATE, ATTENTION, or neither."""
    if pattern := config.get("hybrid_override_pattern"):
        return [PATTERN.get(letter, "") for letter in pattern]
    if "attn_layer_period" in config:
        period, offset = int(config["attn_layer_period"]), int(config["attn_layer_offset"])
        return [ATTENTION if at % period == offset else STATE for at in range(count)]
    for name in ("attn_layer_indices", "full_attn_idxs"):
        if config.get(name) is not None:
            places = set(config[name])
            return [ATTENTION if at in places else STATE for at in range(count)]
    if every := config.get("full_attention_interval"):
        return [STATE if (at + 1) % int(every) else ATTENTION for at in range(count)]
    return [ATTENTION] * count


def kind_of(listed: str) -> str:
    if listed in STATES:
        return STATE
    if listed in HYBRIDS:
        return BOTH
    return ATTENTION if "attention" in listed else listed


def state_bytes(config: Mapping[str, Any]) -> int:
    """The most bytes of all states of a conversation; 0 if no layer keeps one."""
    layers = layers_of(config)[1]
    return layers * state_numbers(config) * FLOAT32 * KEPT if layers else 0


def state_numbers(config: Mapping[str, Any]) -> int:
    """The numbers of one state of a layer. Raises KeyError, TypeError or ValueError."""
    if "linear_key_head_dim" in config:
        keys, values = (
            whole(config, f"linear_{name}_head_dim") * whole(config, f"linear_num_{name}_heads")
            for name in ("key", "value")
        )
        kernel = whole(config, "linear_conv_kernel_dim")
        return values * whole(config, "linear_key_head_dim") + (2 * keys + values) * kernel
    if "conv_L_cache" in config:
        return whole(config, "hidden_size") * whole(config, "conv_L_cache")
    states = whole(config, "ssm_state_size", "mamba_d_state", "state_size")
    groups = whole(config, "n_groups", "mamba_n_groups", "mamba_ngroups", default=1)
    kernel = whole(config, "conv_kernel", "mamba_d_conv", default=4)
    wide = inner(config)
    return wide * states + (wide + 2 * groups * states) * kernel


def inner(config: Mapping[str, Any]) -> int:
    if config.get("mamba_d_ssm"):
        return whole(config, "mamba_d_ssm")
    if config.get("mamba_num_heads"):
        return whole(config, "mamba_num_heads") * whole(config, "mamba_head_dim")
    return whole(config, "expand", "mamba_expand", default=2) * whole(config, "hidden_size")


def whole(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of these settings that is present, as a positive integer. Raises ValueError for
    another value, KeyError if none is present and there is no default."""
    for name in names:
        if config.get(name) is not None:
            value = int(config[name])
            if value < 1:
                raise ValueError(f"{name} is {value}")
            return value
    if default is None:
        raise KeyError(names[0])
    return default


def free_memory(device: str) -> int:
    """Bytes that are free on a device: "cpu", "cuda:0", ..."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()  # torch caches freed memory
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    return int(psutil.virtual_memory().available)
