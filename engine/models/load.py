"""From what a user names to a checked backend: a folder or a GGUF file, here or on the hub."""

from engine.backends.base import Backend
from engine.decode import never
from engine.errors import ModelError
from engine.models.memory import Need
from engine.settings import Runtime

DEFAULT = Runtime()


def load(source: str, runtime: Runtime = DEFAULT) -> Backend:
    """Load the model that `source` names; what is not here yet is downloaded, without a bar.

    Raises ModelError for one that cannot be used.
    """
    if is_gguf(source):
        from engine.models.load_llamacpp import load_gguf
        from engine.models.sources import download

        backend: Backend = load_gguf(download(source, lambda done, total: None, never), runtime)
        return backend
    from engine.models.load_transformers import load_transformers

    return load_transformers(
        source, runtime.device, runtime.dtype, runtime.context_length, runtime.threads
    )


def is_gguf(source: str) -> bool:
    """Whether `source` names a GGUF file rather than a folder or a hub id."""
    return source.lower().endswith(".gguf")


def memory_need(source: str, runtime: Runtime = DEFAULT) -> Need:
    """What that model will take, told before it is loaded.

    Raises ModelError for what is no model, and for a GGUF file that was not downloaded yet.
    """
    if is_gguf(source):
        from engine.models.load_llamacpp import need
        from engine.models.sources import located

        path = located(source)
        if path is None:
            raise ModelError(
                f"What {source!r} will need is known once it is here. Download it in the Models "
                "tab, or start with it as --model."
            )
        return need(path, runtime)
    from engine.models import memory

    device = device_of(source, runtime)
    return memory.memory_need(source, device, runtime.dtype, runtime.context_length)


def device_of(source: str, runtime: Runtime = DEFAULT) -> str:
    """Where that model would be: "cpu", "cuda:0", "mps". Raises ModelError for what is not here."""
    if is_gguf(source):
        from engine.models.load_llamacpp import device

        return device(runtime)
    from engine.models.load_transformers import pick_device

    return str(pick_device(runtime.device))
