"""From a folder or a hub id to a checked model that is split over several processes.

The library has a plan for splitting the layers of an architecture, and each rank reads only its
part of the weights. Like any other model, it is checked by comparing a tree forward with plain
forwards on the same ranks. Its text is therefore that of plain decoding on these ranks. A single
process adds in another order: its logits differ by about 1e-5, and a near-tie may be decided
differently.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.util import find_spec
from typing import Any
from weakref import finalize

import torch
from torch.distributed import Store  # type: ignore[attr-defined]
from transformers import AutoConfig, DistributedConfig

from engine.backends.chat_template import FILLER
from engine.backends.parallel import Follower, ParallelBackend, held, splits
from engine.backends.rank_processes import LITTLE, Group, Ranks
from engine.backends.transformers import TransformersBackend
from engine.errors import ModelError
from engine.machine import ranks_here
from engine.models import load_transformers as whole
from engine.models.torch_heads import with_head
from engine.settings import Runtime

HEADS = {"num_attention_heads": "attention heads", "num_key_value_heads": "key heads"}
"""The counts of which each rank gets an equal share."""


def load_split(source: str, runtime: Runtime) -> ParallelBackend:
    """Load a model over `runtime.tensor_parallel` ranks, of which this process is the first; see
    `load_transformers`. Raises ModelError."""
    size = runtime.tensor_parallel
    where = whole.pick_device(runtime.device)
    whole.pick_dtype(runtime.dtype, where)
    source = whole.found(source)
    check_splits(source, where.type, size)
    FILLER.prepare("transformers")
    threads = runtime.threads or max(1, whole.USUAL_THREADS // ranks_here(size))
    job = {"source": source, "runtime": asdict(replace(runtime, threads=threads))}
    ranks = Ranks(size, where.type, job)
    try:
        model, tokenizer = read(source, where, runtime, threads)
        ranks.begin()
        if not splits(model):
            kind = model.config.get_text_config().model_type
            raise refused(source, f"transformers splits no layer of {kind} models")
        info = whole.describe(source, model, tokenizer, runtime.context_length)
        info = replace(info, ranks=size, memory_bytes=held(model))
        backend = ParallelBackend(model, tokenizer, info, ranks)
        finalize(model, ranks.close)
        whole.examine(backend, whole.TOLERANCE[model.dtype])
        with_head(backend, source, runtime.head)
    except Exception as error:
        raised = ranks.broken(error) if ranks.failed.wait(LITTLE) else error
        ranks.noticed.set()
        ranks.close()
        raise raised from error
    return backend


def read(source: str, where: torch.device, runtime: Runtime, threads: int) -> tuple[Any, Any]:
    """This rank's part of a model, and the tokenizer. Raises ModelError."""
    torch.set_num_threads(threads)
    config = DistributedConfig(tp_size=runtime.tensor_parallel)
    return whole.read(source, where, runtime.dtype, {"distributed_config": config})


def follow(store: Store, rank: int) -> None:
    """Run a rank other than the first: load its part, then execute the commands of rank 0."""
    job: Mapping[str, Any] = json.loads(store.get("job"))
    runtime = Runtime(**job["runtime"])
    store.set(f"here/{rank}", "")
    group = Group(store, rank, job["size"], job["kind"])
    where = whole.pick_device(runtime.device)
    model, tokenizer = read(job["source"], where, runtime, runtime.threads)
    info = whole.describe(job["source"], model, tokenizer, runtime.context_length)
    follower = Follower(group, TransformersBackend(model, tokenizer, info))
    store.set(f"loaded/{rank}", str(held(model)))
    follower.run()


def check_splits(source: str, device: str, size: int) -> None:
    """Raise ModelError if a model cannot be split over so many ranks, before any is started."""
    if find_spec("accelerate") is None:
        raise ModelError(
            "A model is split over several processes with the package accelerate, which is not "
            "installed. Install it (pip install 'strata-chat[cluster]'), or set Tensor parallel "
            "to 1."
        )
    if device == "mps" or device == "cpu" and torch.cuda.is_available():
        raise ModelError(
            f"A model cannot be split over processes on {device!r} here: that works on processors "
            "where there is no GPU, and on CUDA devices. Set Tensor parallel to 1."
        )
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False).get_text_config()
    except Exception as error:
        raise whole.unusable(source, error) from error  # as for one that is not split
    if not getattr(config, "base_model_tp_plan", None):
        raise refused(source, f"transformers does not say how to split {config.model_type} models")
    for name, words in HEADS.items():
        count = getattr(config, name, None)
        if count and count % size:
            raise refused(source, f"its {count} {words} cannot be shared out evenly", size)


def refused(source: str, why: str, size: int = 0) -> ModelError:
    over = f"{size} processes" if size else "several processes"
    return ModelError(
        f"The model {source!r} cannot be split over {over}: {why}. Set Tensor parallel to "
        f"{'a number that divides it, or to ' if size else ''}1."
    )
