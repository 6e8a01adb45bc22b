"""What a model will take before any of it is loaded, and what is free where it would go.

The headers of the weight files tell the parameters, the config tells the cache. Nothing else of
the files is read, so that a model which does not fit is refused in milliseconds.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import psutil

from engine.drafting.costs import LARGEST
from engine.errors import ModelError, first_line
from engine.machine import computes_bfloat16
from engine.models.outlook import Outlook, of_config
from engine.models.prediction_layers import Prediction, prediction
from engine.models.state_memory import layers_of, state_bytes, whole

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "U32": 4, "U16": 2}
"""Bytes of a number in a weight file; what is not listed takes one."""
KEEPING = (
    "k_proj.weight", "v_proj.weight", "kv_b_proj.weight", "fc.weight", "eh_proj.weight",
    "post_projection.weight",
)  # fmt: skip
"""How the names of those tensors of a head end whose outputs it keeps for each token."""
DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class Need:
    """What a model takes: its parameters, bytes of its weights and of its cache.

    `cache` is that of the conversation in use, with a full context. Others that stay warm come on
    top of it; they are bounded by the limit of engine/sequences.py. `outlook` is what the same
    files tell of what will draft for it, where they do.
    """

    parameters: int
    weights: int
    cache: int
    outlook: Outlook | None = field(default=None, compare=False)

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.weights + self.cache


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a weight file: its name, the kind of its numbers, as such files name it, and its
    shape."""

    name: str
    stored: str
    shape: Sequence[int]

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)


def memory_need(
    source: str,
    device: str,
    dtype: str,
    context_length: int,
    head: Path | None = None,
    ahead: bool = True,
) -> Need:
    """The need of a model in a folder or in the hub's cache, in the `dtype` it would be loaded in.

    `dtype` is as for `load_transformers`, where `pick_dtype` says what "auto" is. `head` is the
    folder of the head that is loaded with it; with `ahead` its prediction layers are, if it has
    some. Raises ModelError for what is no model, or is not on this machine yet.
    """
    folder = folder_of(source)
    config = config_of(source, folder)
    kind = DTYPES.get(dtype)
    if dtype == "auto":
        kind = DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")))
        if device.startswith("cpu") and not (kind == "BF16" and computes_bfloat16()):
            kind = "F32"
    listed = {each.name: each for each in tensors(source, folder)}
    layers = config.get("num_hidden_layers")
    found = prediction(listed, layers if isinstance(layers, int) else len(listed))
    own = usable(found, listed) if found and ahead else []
    left = found.names - {each.name for each in own} if found else ()
    parameters = weights = 0
    for name, each in listed.items():
        if name in left:
            continue
        floating = each.stored.startswith(("F", "BF"))
        parameters += each.count
        weights += each.count * SIZES.get(kind if kind and floating else each.stored, 1)
    number = SIZES[kind] if kind else SIZES["BF16"]
    cache = cache_numbers(source, config, context_length) * number + states(source, config)
    cache += kept(own) * context_length * number
    if head is not None:
        numbers, row = head_numbers(head)
        weights, cache = weights + numbers * number, cache + row * context_length * number
    return Need(parameters, weights, cache, of_config(config, folder, found))


def usable(found: Prediction, listed: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors of prediction layers that are loaded: none where something is missing."""
    parts = () if found.problem else (*found.joints, *found.layers)
    return [listed[name] for name in {each for part in parts for each in part.values()}]


def kept(tensors: Iterable[Tensor]) -> int:
    """The numbers that a head of these tensors keeps per token: a hidden state, a key and a value
    of each layer."""
    return sum(each.shape[0] for each in tensors if each.shape and each.name.endswith(KEEPING))


def folder_of(source: str) -> Path:
    """The folder of a model: as given, or where the hub's cache keeps the config of that id."""
    folder = Path(source).expanduser()
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


def config_of(source: str, folder: Path) -> Mapping[str, Any]:
    """The text model's part of config.json."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        inner = config.get("text_config", config)
        return {**config, **inner}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise unreadable(source, f"its config.json cannot be read ({error})") from error


def cache_numbers(source: str, config: Mapping[str, Any], context_length: int) -> int:
    """The keys and values of a full context: layers that have attention x 2 x heads x size of a
    head x rows."""
    try:
        layers, _ = layers_of(config)
        if not layers:
            return 0
        heads = whole(config, "num_attention_heads", "n_head")
        hidden = whole(config, "hidden_size", "n_embd")
        key_heads = whole(config, "num_key_value_heads", default=heads)
        size = whole(config, "head_dim", default=hidden // heads)
        own = whole(config, "max_position_embeddings", "n_positions", default=context_length)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise unreadable(source, f"its config.json does not tell its sizes ({error})") from error
    # Behind the context there is room for the largest draft tree and its root.
    return layers * 2 * key_heads * size * (min(own, context_length) + LARGEST + 1)


def states(source: str, config: Mapping[str, Any]) -> int:
    """What layers that keep a state take, for all states that are kept."""
    try:
        return state_bytes(config)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise unreadable(source, f"its config.json does not tell its states ({error})") from error


def tensors(source: str, folder: Path) -> Iterator[Tensor]:
    """Every tensor of the weight files, or of those on the hub if they were not downloaded yet."""
    from huggingface_hub import parse_local_safetensors_file_metadata

    files: list[Any] = []
    for path in weight_files(source, folder):
        try:
            files.append(parse_local_safetensors_file_metadata(path))
        except Exception as error:
            # What a damaged header makes the library raise depends on the damage.
            problem = f"{path.name} is no sound safetensors file ({first_line(error)})"
            raise unreadable(source, problem) from error
    for file in files or hub_files(source, folder):
        for name, tensor in file.tensors.items():
            yield Tensor(name, str(tensor.dtype), tensor.shape)


def hub_files(source: str, folder: Path) -> list[Any]:
    """The weight files of a model on the hub, of which only the headers are fetched."""
    if folder == Path(source).expanduser():
        raise unreadable(source, "it holds no *.safetensors files")
    from huggingface_hub import get_safetensors_metadata

    try:
        return list(get_safetensors_metadata(source).files_metadata.values())
    except Exception as error:
        # As above: whatever the hub's client raises, the weights cannot be had.
        raise unreadable(source, f"the hub gives no weights ({first_line(error)})") from error


def head_numbers(folder: Path) -> tuple[int, int]:
    """The numbers in the weights of a head, and those that it keeps per token: a hidden state, a
    key and a value. None where it cannot be read: it is left out then."""
    from huggingface_hub import parse_local_safetensors_file_metadata

    found: list[Tensor] = []
    for path in folder.glob("*.safetensors"):
        try:
            tensors = parse_local_safetensors_file_metadata(path).tensors
        except Exception:
            # What a damaged header makes the library raise depends on the damage.
            return 0, 0
        found += [Tensor(name, "", each.shape) for name, each in tensors.items()]
    return sum(each.count for each in found), kept(found)


def weight_files(source: str, folder: Path) -> Sequence[Path]:
    """The files that would be loaded: those of the index, else the one file, else all there are."""
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return [folder / Path(name).name for name in sorted(set(names))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise unreadable(source, f"its {index.name} cannot be read ({error})") from error
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    return sorted(folder.glob("*.safetensors"))


def unreadable(source: str, problem: str) -> ModelError:
    """The error for a folder that is no model."""
    return ModelError(
        f"The model {source!r} cannot be used: {problem}. Give a folder that holds config.json, a "
        "tokenizer and *.safetensors files."
    )


def free_memory(device: str) -> int:
    """Bytes that are free on a device: "cpu", "cuda:0", ..."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()  # what a model left behind is torch's still, and free
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    return int(psutil.virtual_memory().available)
