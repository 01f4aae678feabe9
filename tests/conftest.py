"""Tiny random decoders and a tiny tokenizer, built in code: no hub, no files, milliseconds each.

Tests get what they need from fixtures. Fixtures named `make_*` are factories; what a test may change, it makes anew.
"""

from __future__ import annotations

import os
import subprocess
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: nothing here may reach for the hub

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hypothesis import settings
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ttmem import Memory, Model
from ttmem.compaction.document import Document
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.settings import LatentSettings

settings.register_profile("ttmem", derandomize=True, deadline=None, max_examples=25)
settings.load_profile("ttmem")
torch.set_num_threads(1)

VOCABULARY = 300
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>")
MERGES = (
    "Ġ t", "h e", "Ġt he", "i n", "r e", "o n", "e r", "a n", "Ġ a", "s t", "e n", "o r", "Ġ w", "Ġ s", "t i", "ti on"
)  # fmt: skip
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DOCUMENT = (
    "The ferry to Lerwick leaves at nine on Mondays and at ten on Fridays. Ada Quist keeps the store on the east quay; "
    "its number is 4417. In winter the boat waits for the tide, and the cook, Tom Berg, serves soup on deck.\n"
    "Nobody may carry paraffin below. The lamps are the mate's: Ines Holm lights them at four."
)

SHARED = {"vocab_size": VOCABULARY, "max_position_embeddings": 2048, "initializer_range": 0.15}
ENDS = {"bos_token_id": None, "eos_token_id": 257, "pad_token_id": 256}
SMALL = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_hidden_layers": 3, "num_attention_heads": 6, "head_dim": 16}),
    "qwen2": ("Qwen2", {"hidden_size": 64}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": None}),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
    ),
}


def build_network(architecture: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    name, own = ARCHITECTURES[architecture]
    config_class = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    torch.manual_seed(seed)
    network = getattr(transformers, f"{name}ForCausalLM")(config_class(**{**SHARED, **ENDS, **SMALL, **own, **changes}))
    network.generation_config.pad_token_id = ENDS["pad_token_id"]
    return network.eval()


def build_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    vocabulary = {token: i for i, token in enumerate(alphabet)}
    vocabulary |= {token: 256 + i for i, token in enumerate(SPECIAL_TOKENS)}
    vocabulary |= {first + second: 258 + i for i, (first, second) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\n+"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_start|>",
        additional_special_tokens=list(SPECIAL_TOKENS),
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = chat_template
    return wrapped


@pytest.fixture(scope="session")
def make_network() -> Callable[..., PreTrainedModel]:
    """(architecture="llama", seed=0, **config changes) -> a fresh fp32 network."""
    return build_network


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """(chat_template) -> a fresh byte-level tokenizer with a few merges and two special tokens."""
    return build_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="session", params=list(ARCHITECTURES))
def any_model(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast) -> Model:
    """Every tiny architecture in turn. Not to be changed."""
    return Model(build_network(request.param), tokenizer, name=f"tiny {request.param}")


@pytest.fixture(scope="session")
def model(tokenizer: PreTrainedTokenizerFast) -> Model:
    """The tiny Llama. Not to be changed."""
    return Model(build_network("llama"), tokenizer, name="tiny llama")


@pytest.fixture(scope="session")
def gemma(tokenizer: PreTrainedTokenizerFast) -> Model:
    """The tiny Gemma 3, with sliding and full layers. Not to be changed."""
    return Model(build_network("gemma3"), tokenizer, name="tiny gemma3")


@pytest.fixture(scope="session")
def document_text() -> str:
    return DOCUMENT


@pytest.fixture(scope="session")
def quick_settings() -> LatentSettings:
    """Every step of the method, in a second."""
    return LatentSettings(
        rollouts=5,
        rollout_tokens=6,
        top_k=8,
        replay_chunk=64,
        pool=96,
        fit_updates=12,
        fit_positions=16,
        distill_updates=6,
    )


@pytest.fixture(scope="session")
def make_prepared(quick_settings: LatentSettings) -> Callable[..., Prepared]:
    """(model, text, settings) -> a document of the model with its teacher's artifacts on demand."""

    def prepare(
        model: Model, text: str = DOCUMENT, settings: LatentSettings = quick_settings, **others: Any
    ) -> Prepared:
        return Prepared(model, Document.of(model, text), settings, **others)

    return prepare


@pytest.fixture(scope="session")
def make_full(make_prepared: Callable[..., Prepared]) -> Callable[..., Memory]:
    """(model, text or token ids) -> the uncompacted memory."""

    def full(model: Model, text: str | list[int] = DOCUMENT) -> Memory:
        if isinstance(text, str):
            return make_prepared(model, text).full
        return Prepared(model, Document("ids", "0" * 64, torch.tensor(text))).full

    return full


def kernels_run_here() -> bool:
    return torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("kernels") and not kernels_run_here():
        pytest.skip("no GPU: test_in_the_interpreter runs it in another process")


@pytest.fixture
def run_interpreted() -> Callable[[str], None]:
    """(test file) -> its fast tests pass in a process of their own, in Triton's interpreter, which needs no GPU."""
    if kernels_run_here():
        pytest.skip("the kernels run in this process")

    def run(file: str) -> None:
        command = [sys.executable, "-m", "pytest", "-m", "not slow", "-p", "no:cacheprovider", file]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:]
        assert " passed" in done.stdout

    return run
