"""The torch backend: tree rows equal chains, roll-back, prefix reuse, and many kinds of models."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from engine.backends.base import Filled
from engine.decode import decode, never
from engine.drafting.base import Drafter
from engine.drafting.databases import Databases
from engine.hsd.family import Family
from engine.hsd.vocabulary import check_vocabulary
from engine.methods import METHODS
from engine.prompt import Chat
from engine.sampling import distribution
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree, graft
from engine.types import Learned, Message, Prefill, Step
from tests.support.lossless import Adversary, assert_lossless, events_of, tokens_of
from tests.support.replies import reply

if TYPE_CHECKING:
    from engine.backends.transformers import TransformersBackend

pytestmark = pytest.mark.model
GREEDY = Sampling(temperature=0.0)
PATHS = [(3,), (3, 5), (4,), (3, 5, 9), (4, 6), (3, 8), (4, 6, 7), (4, 6, 7, 1)]


def fresh(backend: "TransformersBackend") -> "TransformersBackend":
    """A second backend over the same weights, with a cache of its own."""
    from engine.backends.transformers import TransformersBackend

    return TransformersBackend(backend.model, backend.tokenizer, backend.info)


def tree_of(root: int, paths: Sequence[tuple[int, ...]] = PATHS) -> Tree:
    tree = Tree(root)
    for path in paths:
        graft(tree, path, "context", 1, len(paths))
    assert len(tree) == len(paths)
    return tree


def alone(backend: "TransformersBackend", tokens: Sequence[int]) -> np.ndarray:
    """The logits after `tokens` by the library itself, without any cache."""
    import torch

    with torch.inference_mode():
        output = backend.model(torch.tensor([list(tokens)]), use_cache=False)
    return output.logits[0, -1].float().numpy()


def gap(left: np.ndarray, right: np.ndarray) -> float:
    return float(np.abs(left - right).max())


def prompt_of(size: int, vocabulary: int = 6144) -> list[int]:
    return [(37 * i + i * i) % (vocabulary - 10) + 5 for i in range(size)]


@pytest.mark.parametrize("size", [1, 2, 30, 600])
def test_tree_rows_equal_chains(embedded: Any, size: int) -> None:
    """Also behind a prompt of one token (an empty cache) and one of several chunks."""
    backend, prompt = fresh(embedded), prompt_of(size)
    backend.prefill(prompt, never)
    tree = tree_of(prompt[-1])
    scores = backend.score(tree, GREEDY)
    for row in range(len(tree) + 1):
        assert gap(scores.row(row), alone(backend, [*prompt, *tree.path(row)])) < 1e-3, row


def test_the_tree_check_above_can_fail(embedded: Any) -> None:
    backend, prompt = fresh(embedded), prompt_of(30)
    backend.prefill(prompt, never)
    tree = tree_of(prompt[-1])
    tree.parents[-1] = 1
    scores = backend.score(tree, GREEDY)
    assert gap(scores.row(len(tree)), alone(backend, [*prompt, *PATHS[-1]])) > 0.1


@pytest.mark.parametrize("path", [(), (3,), (4,), (3, 8), (4, 6, 7, 1)])
def test_accepting_rows_apart_equals_a_fresh_prefill(embedded: Any, path: tuple[int, ...]) -> None:
    backend, other, prompt = fresh(embedded), fresh(embedded), prompt_of(20)
    backend.prefill(prompt, never)
    tree = tree_of(prompt[-1])
    backend.score(tree, GREEDY)
    rows = {tree.path(row): row for row in range(len(tree) + 1)}
    backend.accept([rows[path[: n + 1]] for n in range(len(path))])
    assert backend.cached == [*prompt, *path] and backend.cache.length == len(backend.cached)
    next_tree = tree_of(11)
    other.prefill([*prompt, *path, 11], never)
    ours, theirs = backend.score(next_tree, GREEDY), other.score(next_tree, GREEDY)
    for row in range(len(next_tree) + 1):
        assert gap(ours.row(row), theirs.row(row)) < 1e-4


def test_rolling_back_leaves_no_trace(embedded: Any) -> None:
    """Rejected rows of a big tree, then another text behind a shared prefix."""
    backend, prompt = fresh(embedded), prompt_of(40)
    backend.prefill(prompt, never)
    backend.score(tree_of(prompt[-1], [(token,) for token in range(100)]), GREEDY)
    backend.accept([])
    edited = [*prompt[:25], 9, 8, 7]
    assert backend.prefill(edited, never).reused == 25
    row = backend.score(Tree(edited[-1]), GREEDY).row(0)
    assert gap(row, alone(backend, edited)) < 1e-3


@pytest.mark.parametrize(
    ("after", "reused"),
    [
        ([1, 2, 3, 4, 5, 6], 4),
        ([1, 2, 3, 4, 5], 4),
        ([1, 2, 3], 2),
        ([1, 2, 9, 4, 5], 2),
        ([9, 1, 2], 0),
        ([1], 0),
    ],
)
def test_prefill_reuses_the_longest_common_prefix(
    embedded: Any, after: list[int], reused: int
) -> None:
    backend = fresh(embedded)
    assert backend.prefill([1, 2, 3, 4, 5], never).reused == 0
    assert backend.prefill(after, never).reused == reused
    assert backend.cached == after[:-1] and backend.cache.length == len(after) - 1
    row = backend.score(Tree(after[-1]), GREEDY).row(0)
    assert gap(row, alone(backend, after)) < 1e-3


class Counting:
    """Counts the rows a backend sends through its model."""

    def __init__(self, backend: "TransformersBackend", monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        forward = backend.forward

        def counted(tokens: Sequence[int], *rest: Any, **named: Any) -> Any:
            self.rows.append(len(tokens))
            return forward(tokens, *rest, **named)

        monkeypatch.setattr(backend, "forward", counted)


def test_a_long_prompt_is_prefilled_in_chunks(
    embedded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, prompt = fresh(embedded), prompt_of(1201)
    count = Counting(backend, monkeypatch)
    backend.prefill(prompt, never)
    assert count.rows == [512, 512, 176]
    row = backend.score(Tree(prompt[-1]), GREEDY).row(0)
    assert gap(row, alone(backend, prompt)) < 1e-3


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_a_cancelled_prefill_goes_on_where_it_stopped(
    embedded: Any, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    """Before its second forward, or between two layers of that."""
    backend, prompt = fresh(embedded), prompt_of(1201)
    left = iter([False] * layers)
    stopped = backend.prefill(prompt, lambda: len(backend.cached) == 512 and next(left, True))
    assert stopped == Filled(0, False)
    assert backend.cached == prompt[:512] and backend.cache.length == 512
    count = Counting(backend, monkeypatch)
    assert backend.prefill(prompt, never).reused == 512
    assert count.rows == [512, 176]
    row = backend.score(Tree(prompt[-1]), GREEDY).row(0)
    assert gap(row, alone(backend, prompt)) < 1e-3


def test_a_cancelled_prompt_ends_without_a_token(embedded: Any) -> None:
    steps = events_of(fresh(embedded), prompt_of(700), Generation(GREEDY), cancelled=lambda: True)
    assert steps == [Step(0, (), finish="cancelled")]


def test_turns_do_not_get_dearer_as_the_history_grows(
    embedded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a turn prefills is its own new words, however long the conversation is."""
    backend = fresh(embedded)
    chat, messages, prefilled = Chat(backend), [], []
    count = Counting(backend, monkeypatch)
    wanted = Generation(Sampling(0.7, seed=3), max_tokens=30)
    for _ in range(6):
        messages.append(Message("user", "And what did the fox do next?"))
        count.rows.clear()
        events = list(reply(chat, chat.prompt(messages), [], wanted, METHODS["plain"].drafting))
        steps = [event for event in events if isinstance(event, Step)]
        prefill = events[0]
        assert isinstance(prefill, Prefill)
        fed = sum(count.rows) - len(steps)
        assert fed == prefill.tokens - prefill.reused - 1
        prefilled.append(fed)
        messages.append(Message("assistant", "".join(t.text for t in tokens_of(steps))))
    assert max(prefilled[1:]) <= prefilled[0] + 4
    assert len(chat.tokens) > 5 * prefilled[0]


def test_the_context_can_be_filled_to_its_end(embedded: Any) -> None:
    from dataclasses import replace

    backend = fresh(embedded)
    backend.info = replace(backend.info, context_length=64)
    backend.reset()
    prompt, wanted = prompt_of(50), Generation(Sampling(0.7), max_tokens=500)
    plain = events_of(backend, prompt, wanted)
    truth = [*prompt, *(token.id for token in tokens_of(plain))]
    far = Adversary(lambda tokens: [tuple(truth[len(tokens) : len(tokens) + 40])])
    fast = events_of(backend, prompt, wanted, [far], Drafting(nodes=128))
    assert_lossless(plain, fast)
    assert fast[-1].finish in ("context", "eos") and len(truth) <= 64


def test_the_largest_tree_fits(embedded: Any) -> None:
    backend, prompt = fresh(embedded), prompt_of(10)

    wide = Adversary(lambda tokens: [(token,) for token in range(200)])
    wanted = Generation(GREEDY, max_tokens=6)
    fast = events_of(backend, prompt, wanted, [wide], Drafting(nodes=128))
    assert fast[0].proposed == {"model": 128}
    assert_lossless(events_of(fresh(embedded), prompt, wanted), fast)


def test_probabilities_are_the_softmax_of_the_logits(embedded: Any) -> None:
    backend, prompt = fresh(embedded), prompt_of(12)
    backend.prefill(prompt, never)
    tree = tree_of(prompt[-1])
    scores = backend.score(tree, GREEDY)
    for row in range(len(tree) + 1):
        logits = np.float64(scores.row(row))
        law = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        likely = np.argsort(-law)[:9]
        assert likely[0] == scores.choose(row)
        shares = [scores.probability(row, int(token)) for token in likely]
        assert shares == pytest.approx(law[likely], rel=1e-4)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.7, top_k=9), Sampling(1.3, top_p=0.8)])
def test_the_distribution_is_the_law_that_is_sampled_from(
    embedded: Any, sampling: Sampling
) -> None:
    backend, prompt = fresh(embedded), prompt_of(12)
    backend.prefill(prompt, never)
    tree = tree_of(prompt[-1])
    scores = backend.score(tree, sampling)
    for row in range(len(tree) + 1):
        law = scores.distribution(row)
        assert law.shape == (backend.info.vocabulary_size,) and law.dtype == np.float32
        assert law.sum() == pytest.approx(1.0, abs=1e-5) and law[scores.choose(row)] > 0
        assert (law == distribution(scores.row(row), sampling)).all()


@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(0.7, seed=3), Sampling(1.0, 40, 0.9, 0.02, 4)]
)
def test_logits_that_stay_on_a_device_give_the_same_answer(
    embedded: Any, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the device is the host; what is copied of the logits is little all the same."""
    from engine.backends.device_scores import DeviceScores

    wanted, prompt, rows = Generation(sampling, max_tokens=40), prompt_of(30), list[int]()
    host = fresh(embedded)
    assert not host.on_device
    plain = events_of(host, prompt, wanted)
    device = fresh(embedded)
    device.on_device = True
    real = DeviceScores.row
    monkeypatch.setattr(
        DeviceScores, "row", lambda scores, row: (rows.append(row), real(scores, row))[1]
    )
    truth = [*prompt, *(token.id for token in tokens_of(plain))]
    drafter = Adversary(lambda tokens: [tuple(truth[len(tokens) : len(tokens) + 5]), (7, 8)])
    for drafters in ([], [drafter]):
        assert_lossless(plain, events_of(device, prompt, wanted, drafters))
    assert len(rows) < 8, "a whole row is rarely needed"


def test_the_embedded_models_are_one_family(embedded: Any, embedded_drafts: Any) -> None:
    models = [*embedded_drafts.values(), embedded]
    sizes = [model.info.parameters for model in models]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1] / 4
    for model in models:
        info, names = model.info, model.vocabulary()
        assert info.memory_bytes == 4 * info.parameters and info.tokenizer_type == "BPE"
        assert len({*names}) == len(names) <= info.vocabulary_size
        assert names[model.tokenize("<|end|>")[0]] == "<|end|>"
        assert names == embedded.vocabulary()
        check_vocabulary(embedded, model)
    family = Family(embedded, dict(reversed(embedded_drafts.items())))
    assert [*family.drafts] == ["small", "mid"]


def test_a_model_with_another_tokenizer_is_refused(embedded: Any, tmp_path: Path) -> None:
    from engine.errors import ModelError

    other = load(save_model("llama-gqa", tmp_path))
    with pytest.raises(ModelError) as caught:
        Family(embedded, {"other": other})
    text = str(caught.value)
    assert "its tokenizer is WordLevel, not BPE; it has 100 tokens, not" in text
    assert "the first token that differs is 0: '<pad>', not " in text


def test_a_model_that_decodes_plainly_does_not_draft(embedded: Any, tmp_path: Path) -> None:
    from engine.errors import ModelError

    with pytest.raises(ModelError, match="other cannot draft: mamba models keep a state"):
        Family(embedded, {"other": load_kind(PLAIN, tmp_path)})


def test_forwards_on_a_gpu_are_waited_for(embedded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the time of a forward would count as that of sampling."""
    import torch

    backend, waits = fresh(embedded), list[str]()
    backend.prefill([5, 6], never)
    logits = SimpleNamespace(is_cuda=True, device="cuda:0")
    monkeypatch.setattr(backend, "forward", lambda *tokens, **named: logits)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    backend.score(Tree(6), GREEDY)
    assert waits == ["cuda:0"]


def test_text_and_template(embedded: Any) -> None:
    text = "Ünïcode, 日本語 and 😀."
    assert embedded.detokenize(embedded.tokenize(text)) == text
    rendered = embedded.render([Message("user", " hi "), Message("assistant", "yes")])
    assert rendered.endswith("<|user|>hi<|end|><|assistant|>yes<|end|><|assistant|>")
    pieces = [embedded.detokenize([token]) for token in embedded.tokenize("😀")]
    assert len(pieces) == 1 or "\ufffd" in pieces[0]


# Random weights of many architectures, made on the fly, each loaded like any other folder.

SMALL = {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
FREE = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("LlamaConfig", {**WIDE, "max_position_embeddings": 256}),
    "qwen3": ("Qwen3Config", {**WIDE, "max_position_embeddings": 256}),
    "mistral-window": (
        "MistralConfig", {**WIDE, "sliding_window": 8, "max_position_embeddings": 256},
    ),
    "gemma2-mixed": (
        "Gemma2Config", {**WIDE, "sliding_window": 8, "max_position_embeddings": 256},
    ),
    "gemma3-mixed": (
        "Gemma3TextConfig",
        {**WIDE, "sliding_window": 8, "max_position_embeddings": 256,
         "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "llama4-chunks": (
        "Llama4TextConfig",
        {**WIDE, "num_hidden_layers": 4, "intermediate_size_mlp": 64, "attention_chunk_size": 8,
         "num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
         "max_position_embeddings": 256},
    ),
    "phi3": ("Phi3Config", {**SMALL, "intermediate_size": 64, "max_position_embeddings": 256}),
    "gpt-neox": (
        "GPTNeoXConfig", {**SMALL, "intermediate_size": 64, "max_position_embeddings": 256},
    ),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": 160, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    ),
    "mamba": (
        "MambaConfig",
        {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    ),
    "mamba2": (
        "Mamba2Config",
        {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8,
         "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
    ),
    "qwen3-next-hybrid": (
        "Qwen3NextConfig",
        {**WIDE, "max_position_embeddings": 1024, "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
         "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    ),
    "mamba-unknown": (
        "MambaConfig",
        {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    ),
}  # fmt: skip


RECURRENT = ("mamba", "mamba2", "qwen3-next-hybrid", "mamba-unknown")
PLAIN = "mamba-unknown"
"""One whose layers count as unknown, so that its states cannot be rolled back."""


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of single characters, with a chat template, small enough to write down."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", "<unk>", *(chr(code) for code in range(32, 127)), "\n"]
    words = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        unk_token="<unk>",
    )  # fmt: skip
    wrapped.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}assistant: "
    )
    wrapped.save_pretrained(folder)


def save_model(kind: str, folder: Path, **changes: Any) -> Path:
    import torch
    import transformers

    name, settings = KINDS[kind]
    config = getattr(transformers, name)(**{**settings, **FREE, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    # Sharper than a fresh model, so that attention and therefore its mask matters.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0 if kind not in RECURRENT else 2.0)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def load(folder: Path, **options: Any) -> "TransformersBackend":
    from engine.models.load_transformers import load_transformers

    return load_transformers(str(folder), device="cpu", **options)


def load_kind(kind: str, folder: Path) -> "TransformersBackend":
    """A random model of a kind, loaded from where it is saved to."""
    with pytest.MonkeyPatch.context() as patch:
        if kind == PLAIN:
            for module in ("engine.backends.transformers", "engine.models.load_transformers"):
                patch.setattr(f"{module}.kinds_of", lambda config: None)
        return load(save_model(kind, folder))


def drafters_for(truth: Sequence[int], databases: Databases) -> list[Drafter]:
    """A good draft, a wrong branch beside it, and the tiers."""

    def say(tokens: Sequence[int]) -> list[tuple[int, ...]]:
        rest = tuple(truth[len(tokens) : len(tokens) + 5])
        if not rest:
            return []
        wrong = (rest[0] + 1) % 160
        return [(wrong,), rest[:1], (wrong, wrong), rest, (rest[0], wrong)]

    return [Adversary(say), *METHODS["hd"].drafters(databases)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_says_the_same_with_and_without_drafts(
    kind: str, tmp_path: Path
) -> None:
    backend = load_kind(kind, tmp_path)
    plainly = kind == PLAIN
    assert backend.info.can_tree is not plainly, backend.info.note
    assert backend.info.leaves == (1 if kind in RECURRENT else None)
    assert bool(backend.info.note) is (kind in RECURRENT)
    if plainly:
        assert "cannot be rolled back, so it decodes plainly." in backend.info.note
    prompt = prompt_of(30, 160)
    for number, temperature in enumerate((0.0, 0.7, 1.5)):
        wanted = Generation(Sampling(temperature, seed=number), max_tokens=30)
        other = fresh(backend)
        plain = events_of(other, prompt, wanted)
        truth = [*prompt, *(token.id for token in tokens_of(plain))]
        fast = events_of(backend, prompt, wanted, drafters_for(truth, Databases()))
        assert_lossless(plain, fast)
        if kind not in RECURRENT and len(truth) - len(prompt) > 6:
            assert max(len(step.tokens) for step in fast) > 3
        # And the same as the library's own forward, without our cache.
        row = fresh(backend)
        row.prefill(truth, never)
        scored = row.score(Tree(truth[-1]), GREEDY).row(0)
        assert gap(scored, alone(backend, truth)) < 2e-3


@pytest.mark.parametrize("kind", ["mistral-window", "gemma2-mixed", "gemma3-mixed"])
def test_a_window_smaller_than_the_text_is_respected(kind: str, tmp_path: Path) -> None:
    """Trees that begin inside, at the edge of, and beyond the window."""
    backend = load(save_model(kind, tmp_path))
    assert backend.window == 8
    assert max(tree_of(0).depths) == 4, "behind 5 tokens, the cache holds 4: it ends on the edge"
    for size in (1, 4, 5, 6, 7, 8, 9, 20, 40):
        other, prompt = fresh(backend), prompt_of(size, 160)
        other.prefill(prompt, never)
        tree = tree_of(prompt[-1])
        scores = other.score(tree, GREEDY)
        for row in range(len(tree) + 1):
            chain = [*prompt, *tree.path(row)]
            assert gap(scores.row(row), alone(backend, chain)) < 2e-3, (size, row)
    far, near = prompt_of(40, 160), prompt_of(40, 160)
    near[0] = (near[0] + 1) % 160
    assert gap(alone(backend, far), alone(backend, near)) < (1e-6 if "mixed" not in kind else 99)


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_recurrent_model_reuses_a_cache_it_only_extends(kind: str, tmp_path: Path) -> None:
    backend = load_kind(kind, tmp_path)
    prompt = prompt_of(20, 160)
    assert backend.prefill(prompt, never).reused == 0
    assert backend.prefill([*prompt, 5, 6], never).reused == 19
    row = backend.score(Tree(6), GREEDY).row(0)
    assert gap(row, alone(backend, [*prompt, 5, 6])) < 2e-3
    backend.accept([])
    assert backend.prefill([*prompt[:10], 5, 6], never).reused == 0, "it cannot roll back"
    row = backend.score(Tree(6), GREEDY).row(0)
    assert gap(row, alone(backend, [*prompt[:10], 5, 6])) < 2e-3


def test_a_model_that_decodes_wrongly_even_with_its_own_cache_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that the forward does not take would be ignored, and every answer be nonsense."""
    from engine.backends.transformers import TransformersBackend
    from engine.errors import ModelError

    folder = save_model("mamba", tmp_path)
    reset = TransformersBackend.reset

    def misnamed(backend: Any) -> None:
        backend.cache_name = "past_key_values"
        reset(backend)

    monkeypatch.setattr(TransformersBackend, "reset", misnamed)
    with pytest.raises(ModelError, match="decoding with its cache is off by"):
        load(folder)


def broken_mask(*arguments: Any) -> np.ndarray:
    """Every row sees every other one."""
    parents = arguments[0]
    return np.ones((len(parents), len(parents)), dtype=bool)


def test_a_model_whose_tree_check_fails_decodes_plainly_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model("llama-gqa", tmp_path)
    good = load(folder)
    monkeypatch.setattr("engine.backends.transformers.ancestors", broken_mask)
    backend = load(folder)
    assert good.info.can_tree and not backend.info.can_tree
    assert "tree forward is off by" in backend.info.note and "plainly" in backend.info.note
    prompt, wanted = prompt_of(20, 160), Generation(Sampling(0.7), max_tokens=20)
    drafters = METHODS["hd"].drafters(Databases())
    steps = events_of(backend, prompt, wanted, drafters)
    assert all(len(step.tokens) == 1 and not step.proposed for step in steps)
    assert_lossless(events_of(good, prompt, wanted), steps)


def test_a_model_that_refuses_our_mask_decodes_plainly_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.backends.transformers import TransformersBackend

    def refuse(*arguments: Any) -> None:
        raise ValueError("only 2-D masks here\nand a long explanation")

    monkeypatch.setattr(TransformersBackend, "mask", refuse)
    backend = load(save_model("llama-gqa", tmp_path))
    assert not backend.info.can_tree
    assert "its tree forward fails (only 2-D masks here)" in backend.info.note
    wanted = Generation(GREEDY, max_tokens=5)
    assert len(tokens_of(events_of(backend, prompt_of(9, 160), wanted))) > 0


@pytest.mark.parametrize("kind", ["llama-gqa", "gemma2-mixed"])
def test_bfloat16_runs(kind: str, tmp_path: Path) -> None:
    backend = load(save_model(kind, tmp_path), dtype="bfloat16")
    assert backend.info.dtype == "bfloat16"
    prompt, wanted = prompt_of(20, 160), Generation(Sampling(0.7, seed=1), max_tokens=20)
    steps = events_of(backend, prompt, wanted, METHODS["hd"].drafters(Databases()))
    tokens = tokens_of(steps)
    assert tokens and all(0.0 <= token.probability <= 1.0 for token in tokens)
    assert backend.cache.layers[0].keys.dtype == backend.model.dtype or not backend.info.can_tree


def test_every_end_token_ends_an_answer(tmp_path: Path) -> None:
    folder = save_model("llama-gqa", tmp_path, eos_token_id=[2, 60, 61])
    backend = load(folder)
    assert backend.info.eos_ids >= {2, 60, 61}
    ends = set()
    for seed in range(40):
        wanted = Generation(Sampling(2.0, seed=seed), max_tokens=100)
        steps = events_of(backend, prompt_of(5, 160), wanted)
        last = tokens_of(steps)[-1]
        assert (steps[-1].finish == "eos") == (last.id in backend.info.eos_ids)
        ends.add(last.id)
    assert len(ends & {2, 60, 61}) > 1


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (None, "<s>System: be kind\n\nUser: hi\n\nAssistant:"),
        (
            "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}",
            "system=be kind;user=hi;",
        ),
        (
            "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
            "{% endif %}{{ m.role }}={{ m.content }};{% endfor %}",
            "user=be kind\n\nhi;",
        ),
    ],
)
def test_templates_with_and_without_a_place_for_a_system_prompt(
    tmp_path: Path, template: str | None, wanted: str
) -> None:
    backend = load(save_model("llama-gqa", tmp_path))
    backend.tokenizer.chat_template = template
    assert backend.render([Message("system", "be kind"), Message("user", "hi")]) == wanted


def test_a_template_that_refuses_is_a_prompt_error(tmp_path: Path) -> None:
    from engine.errors import PromptError

    backend = load(save_model("llama-gqa", tmp_path))
    for template in ("{{ raise_exception('never') }}", "{{ messages[9].content.x }}"):
        backend.tokenizer.chat_template = template
        with pytest.raises(PromptError, match="chat template"):
            backend.render([Message("system", "s"), Message("user", "hi")])


def test_a_template_cannot_run_code(tmp_path: Path) -> None:
    from engine.errors import PromptError

    backend = load(save_model("llama-gqa", tmp_path))
    backend.tokenizer.chat_template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(PromptError):
        backend.render([Message("user", "hi")])


def test_events_are_those_of_any_backend(embedded: Any) -> None:
    events = list(
        decode(fresh(embedded), prompt_of(5), [], Generation(GREEDY, max_tokens=3), Drafting())
    )
    assert isinstance(events[0], Prefill) and events[0].tokens == 5
    assert all(isinstance(event, Step) for event in events[1:-1])
    assert isinstance(events[-1], Learned)
