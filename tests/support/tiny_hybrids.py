"""Random models of the families whose layers keep a state, as small as their code allows.

They have the tokenizer of the embedded family. Their weights are larger than those of a fresh model
so that what a layer remembers shows in the logits.
"""

import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
EMBEDDED = ROOT / "assets" / "models" / "tiny-chat" / "target"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
VOCABULARY = 6144
CONTEXT = 2048
USUAL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3,
    "max_position_embeddings": CONTEXT,
}  # fmt: skip
ATTENTION: dict[str, Any] = {
    **USUAL, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
DELTA: dict[str, Any] = {
    **ATTENTION, "num_hidden_layers": 4, "head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    **ATTENTION, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": (
        "Qwen3_5TextConfig",
        {**DELTA, "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0,
            "mrope_section": [2, 1, 1], "mrope_interleaved": True,
        }},
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {**DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 16},
    ),
    "nemotron-h": (
        "NemotronHConfig",
        {**ATTENTION, "num_hidden_layers": 4, "head_dim": 8, "ssm_state_size": 8,
         "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 16,
         "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
    ),
    "lfm2": (
        "Lfm2Config", {**ATTENTION, "layer_types": ["conv", "full_attention", "conv"]},
    ),
    "granite-hybrid": (
        "GraniteMoeHybridConfig",
        {**MAMBA2, "num_local_experts": 0, "shared_intermediate_size": 48,
         "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "falcon-h1": ("FalconH1Config", {**MAMBA2, "mamba_d_ssm": 64, "num_hidden_layers": 2}),
    "bamba": ("BambaConfig", {**MAMBA2, "attn_layer_indices": [1]}),
    "jamba": (
        "JambaConfig",
        {**ATTENTION, "mamba_d_state": 8, "num_experts": 2, "num_experts_per_tok": 1,
         "attn_layer_period": 3, "attn_layer_offset": 1},
    ),
    "mamba": ("MambaConfig", {**USUAL, "state_size": 8}),
    "mamba2": (
        "Mamba2Config",
        {**USUAL, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
    ),
    "falcon-mamba": ("FalconMambaConfig", {**USUAL, "state_size": 8}),
}  # fmt: skip
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5-moe": (
        "Qwen3_5MoeTextConfig",
        {**DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 16},
    ),
    "lfm2-moe": (
        "Lfm2MoeConfig",
        {**ATTENTION, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
         "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]},
    ),
    "olmo-hybrid": ("OlmoHybridConfig", DELTA),
    "zamba2": (
        "Zamba2Config",
        {**ATTENTION, "mamba_d_state": 8, "n_mamba_heads": 8, "chunk_size": 16, "mamba_ngroups": 1,
         "layers_block_type": ["linear_attention", "hybrid", "linear_attention"]},
    ),
}  # fmt: skip
"""Others that share their layers with one of these: loading tries them."""
UNDRAFTED: dict[str, tuple[str, dict[str, Any]]] = {
    "zamba": (
        "ZambaConfig",
        {**ATTENTION, "mamba_d_state": 8, "num_hidden_layers": 4,
         "layers_block_type": ["linear_attention", "hybrid"] * 2},
    ),
}  # fmt: skip
"""Families whose recurrences are not followed row by row."""
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "recurrent-gemma": (
        "RecurrentGemmaConfig",
        {**ATTENTION, "num_key_value_heads": 1, "lru_width": 32, "attention_window_size": 512},
    ),
}
"""Families that cannot be used: they keep what they read in their layers, not in a cache."""
"""The library's class of each config, and its settings."""
SHARPER = 3.0


def save_hybrid(family: str, folder: Path, **changes: Any) -> Path:
    """Write a random model of a family, always the same one, some settings of its config changed;
    returns its folder."""
    name, settings = {**FAMILIES, **MORE, **UNDRAFTED, **REFUSED}[family]
    return save_random(name, {**settings, **changes}, folder)


def save_random(
    name: str, settings: dict[str, Any], folder: Path, sharper: float = SHARPER
) -> Path:
    """The same of the library's config class of that name, its matrices that much larger than those
    of a fresh model."""
    import torch
    import transformers

    special = {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    config = getattr(transformers, name)(**{**special, **settings})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1 and "A_log" not in key:
                parameter.mul_(sharper)
    model.save_pretrained(folder)
    for file in TOKENIZER:
        shutil.copy(EMBEDDED / file, folder)
    return folder
