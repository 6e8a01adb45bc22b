"""Random models with prediction layers (MTP) in their files, as published ones name them.

`save_qwen` writes a Qwen of tiny_hybrids.py. Where it is `knowing`, the next token hangs mostly on
the last one, and its layer was made to know that: so it is right more often than chance, and not
always. `save_glm` writes a GLM 4.5 whose several layers stand behind those of the model.
"""

from pathlib import Path
from typing import Any

from tests.support.tiny_hybrids import ATTENTION, VOCABULARY, save_hybrid, save_random

Tensors = dict[str, Any]
FILE = "model.safetensors"
WIDTH = int(ATTENTION["hidden_size"])
LAST = "model.layers.3."
"""The layer of a Qwen that attends: prediction layers have the same tensors."""
NOISE = 0.03
"""How much a layer adds to what the last token alone says, where it is known."""
SOURCES = ("o_proj", "out_proj", "down_proj")
"""What a layer adds comes through these."""


def tensors_of(folder: Path) -> Tensors:
    from safetensors.torch import load_file

    return dict(load_file(folder / FILE))


def put(folder: Path, tensors: Tensors) -> Path:
    from safetensors.torch import save_file

    whole = {name: each.clone().contiguous() for name, each in tensors.items()}
    save_file(whole, folder / FILE, metadata={"format": "pt"})
    return folder


def like(each: Any, seed: int) -> Any:
    """Other numbers of the same size: scales stay near to what they are."""
    import torch

    made = torch.Generator().manual_seed(seed)
    size = float(each.float().std()) if each.dim() > 1 else 0.05
    centre = float(each.float().mean()) if each.dim() == 1 else 0.0
    return centre + size * torch.randn(each.shape, generator=made)


def save_qwen(family: str, folder: Path, knowing: bool = False, layers: int = 1) -> Path:
    import torch

    tensors = tensors_of(save_hybrid(family, folder, mtp_num_hidden_layers=layers))
    norm = tensors["model.norm.weight"]
    own = {
        f"mtp.layers.{number}.{name.removeprefix(LAST)}": like(each, 100 * number + at)
        for number in range(layers)
        for at, (name, each) in enumerate(sorted(tensors.items()))
        if name.startswith(LAST)
    }
    own["mtp.fc.weight"] = like(torch.randn(WIDTH, 2 * WIDTH), 7) / WIDTH**0.5
    for seed, name in enumerate(("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")):
        own[f"mtp.{name}.weight"] = like(norm, seed)
    tensors |= own
    return put(folder, following(tensors) if knowing else tensors)


def following(tensors: Tensors) -> Tensors:
    """The same where one token is expected behind each, another one a little, and where layers add
    little to that; the prediction layer goes by the token that it is given."""
    import torch

    made = torch.Generator().manual_seed(3)
    tokens = torch.randn(VOCABULARY, WIDTH, generator=made)
    after, also = (torch.randperm(VOCABULARY, generator=made) for _ in range(2))
    output = torch.empty_like(tokens)
    output[after] = tokens
    output[also] += 0.6 * tokens
    output[:3] = 0  # a turn shall not end at once
    quieter = {
        name: each * NOISE if any(part in name for part in SOURCES) else each
        for name, each in tensors.items()
    }
    return quieter | {
        "model.embed_tokens.weight": tokens,
        "lm_head.weight": output * 8 / WIDTH,
        "mtp.fc.weight": torch.cat([torch.eye(WIDTH), NOISE * torch.eye(WIDTH)], dim=1),
    }


GLM: dict[str, Any] = {
    **ATTENTION, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "tie_word_embeddings": False, "partial_rotary_factor": 0.5,
}  # fmt: skip


DEEPSEEK: dict[str, Any] = {
    **GLM, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
}  # fmt: skip
del DEEPSEEK["partial_rotary_factor"]


def save_glm(folder: Path, layers: int = 3) -> Path:
    return with_layers(save_random("Glm4MoeConfig", GLM | ahead(layers), folder), layers)


def save_deepseek(folder: Path, layers: int = 1) -> Path:
    """A DeepSeek V3, whose attention compresses keys and values, with the same."""
    return with_layers(save_random("DeepseekV3Config", DEEPSEEK | ahead(layers), folder), layers)


def ahead(layers: int) -> dict[str, int]:
    return {"num_nextn_predict_layers": layers}


def with_layers(folder: Path, layers: int) -> Path:
    tensors, count = tensors_of(folder), GLM["num_hidden_layers"]
    norm, output = tensors["model.norm.weight"], tensors["lm_head.weight"]
    last = {
        name.split(".", 3)[3]: each
        for name, each in sorted(tensors.items())
        if name.startswith(f"model.layers.{count - 1}.")
    }
    around = {
        "eh_proj.weight": output[:WIDTH].repeat(1, 2),
        "enorm.weight": norm,
        "hnorm.weight": norm,
        "shared_head.norm.weight": norm,
    }
    copies = {"embed_tokens": tensors["model.embed_tokens.weight"], "shared_head.head": output}
    for number in range(layers):
        place = f"model.layers.{count + number}."
        for at, (name, each) in enumerate((last | around).items()):
            tensors[place + name] = like(each, 1000 * number + at)
        for name, each in copies.items():
            tensors[f"{place}{name}.weight"] = each.clone()
    return put(folder, tensors)


WINDOW = 24
GEMMA: dict[str, Any] = {
    **ATTENTION, "num_hidden_layers": 4, "head_dim": 8, "global_head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "sliding_window": WINDOW, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY, "enable_moe_block": False,
    "use_double_wide_mlp": False,
}  # fmt: skip
NARROW: dict[str, Any] = {
    **GEMMA, "hidden_size": 16, "intermediate_size": 24, "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 4,
}  # fmt: skip


def save_gemma(folder: Path, shared: int = 2) -> Path:
    """A Gemma 4, the last layers of which share the keys of those before."""
    return save_random("Gemma4TextConfig", GEMMA | {"num_kv_shared_layers": shared}, folder)


def save_assistant(folder: Path, width: int = WIDTH, **changes: Any) -> Path:
    from transformers import Gemma4TextConfig

    from engine.heads.assistant import sharing

    text = Gemma4TextConfig(**{**NARROW, **changes})
    settings = {"text_config": text, "backbone_hidden_size": width}
    with sharing():
        return save_random("Gemma4AssistantConfig", settings, folder)
