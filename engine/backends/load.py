"""From what a user names to a checked backend: a folder or a GGUF file, here or on the hub."""

from engine.backends.base import Backend
from engine.backends.memory import Need
from engine.settings import Runtime

DEFAULT = Runtime()


def load(source: str, runtime: Runtime = DEFAULT) -> Backend:
    """Load the model that `source` names. Raises ModelError for one that cannot be used."""
    if is_gguf(source):
        from engine.backends.load_llamacpp import load_gguf

        backend: Backend = load_gguf(source, runtime)
        return backend
    from engine.backends.load_transformers import load_transformers

    return load_transformers(
        source, runtime.device, runtime.dtype, runtime.context_length, runtime.threads
    )


def is_gguf(source: str) -> bool:
    """Whether `source` names a GGUF file rather than a folder or a hub id."""
    return source.lower().endswith(".gguf")


def memory_need(source: str, runtime: Runtime = DEFAULT) -> Need:
    """What that model will take before it is loaded. Raises ModelError for what is no model."""
    if is_gguf(source):
        from engine.backends.load_llamacpp import need

        return need(source, runtime)
    from engine.backends import memory

    device = device_of(source, runtime)
    return memory.memory_need(source, device, runtime.dtype, runtime.context_length)


def device_of(source: str, runtime: Runtime = DEFAULT) -> str:
    """Where that model would be: "cpu", "cuda:0", "mps". Raises ModelError for what is not here."""
    if is_gguf(source):
        from engine.backends.load_llamacpp import device

        return device(runtime)
    from engine.backends.load_transformers import pick_device

    return str(pick_device(runtime.device))
