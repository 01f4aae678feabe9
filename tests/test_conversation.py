"""Conversations: every reply is the one a fresh start would give, and little is computed twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ttmem import Memory, MemoryMismatchError, Model, ModelError
from ttmem.conversation import Conversation

ALL_BUT_LETTERS = [i for i in range(300) if not (32 <= i < 94 or 258 <= i < 274)]
OPTIONS: dict[str, Any] = {"suppress_tokens": ALL_BUT_LETTERS}  # replies survive decoding and encoding
MESSAGES = ["Who keeps it?", "And the lamps?", "When?"]
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
TEMPLATES = {
    "plain": PLAIN,
    "a default system message": DEFAULT_SYSTEM + PLAIN,
    "past replies are cut": PLAIN.replace(
        "{{ m['content'] }}", "{{ m['content'] if m['role'] != 'assistant' else m['content'][:2] }}"
    ),
    "the count of turns comes first": "[{{ messages | length }}]" + PLAIN,
    "the count of turns is in every turn": PLAIN.replace("<|im_start|>{{", "({{ messages | length }})<|im_start|>{{"),
}


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def network(request: pytest.FixtureRequest, make_network: Any) -> Any:
    return make_network(request.param)


@pytest.fixture
def make_conversation(network: Any, make_tokenizer: Any, make_full: Any) -> Any:
    def make(template: str = PLAIN, **options: Any) -> Conversation:
        model = Model(network, make_tokenizer(template))
        return Conversation(model, make_full(model), max_new_tokens=5, generate=OPTIONS, **options)

    return make


def plain_reply(conversation: Conversation) -> str:
    """The reply to the messages so far from scratch: the plain model on document and prompt."""
    model, memory = conversation.model, conversation.memory
    prompt = conversation._prompt()
    assert memory.tokens is not None
    ids = torch.tensor([memory.tokens.tolist() + prompt])
    options = {"do_sample": False, "max_new_tokens": 5, **OPTIONS}
    output = model.network.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return model.decode(output[0, ids.shape[1] :])


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_every_reply_is_that_of_a_fresh_start(make_conversation: Any, template: str) -> None:
    conversation = make_conversation(template)
    for turn, message in enumerate(MESSAGES):
        reply = conversation.say(message)
        last = conversation.messages.pop()
        assert last == {"role": "assistant", "content": reply.strip()}
        assert conversation.messages[-1] == {"role": "user", "content": message}
        assert reply == plain_reply(conversation)
        conversation.messages.append(last)
        assert len(conversation.messages) == 2 * turn + 2


def test_a_first_prompt_is_the_turn_without_what_the_template_puts_before_it(make_conversation: Any) -> None:
    for name in ("plain", "a default system message"):
        conversation = make_conversation(TEMPLATES[name])
        conversation.messages = [{"role": "user", "content": "Who?"}]
        text = conversation.model.tokenizer.decode(conversation._prompt())
        assert text == "\n\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"


def test_a_system_message_is_rendered_first(make_conversation: Any) -> None:
    conversation = make_conversation(TEMPLATES["a default system message"], system="Be brief.")
    assert conversation.say("Who?") == plain_reply_of(conversation, "Who?")
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    conversation.messages.append({"role": "user", "content": "Who?"})
    text = conversation.model.tokenizer.decode(conversation._prompt())
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho?" in text
    assert "Help." not in text


def plain_reply_of(conversation: Conversation, message: str) -> str:
    kept = conversation.messages
    conversation.messages = [*([kept[0]] if conversation.system else []), {"role": "user", "content": message}]
    reply = plain_reply(conversation)
    conversation.messages = kept
    return reply


def test_only_new_tokens_are_run(make_network: Any, make_tokenizer: Any, make_full: Any) -> None:
    model = Model(make_network("llama"), make_tokenizer())
    conversation = Conversation(model, make_full(model), max_new_tokens=5, generate=OPTIONS)
    run: list[int] = []
    model.network.get_input_embeddings().register_forward_pre_hook(lambda _, args: run.append(args[0].shape[1]))
    conversation.say(MESSAGES[0])
    first = len(conversation.cached)
    run.clear()
    conversation.say(MESSAGES[1])
    whole = len(conversation.cached)
    assert sum(run) <= whole - first + 6
    assert conversation.cache.get_seq_length() == conversation.memory.document_length + whole


def test_reset_forgets_the_turns(make_conversation: Any) -> None:
    conversation = make_conversation()
    first = conversation.say(MESSAGES[0])
    conversation.say(MESSAGES[1])
    conversation.reset()
    assert conversation.messages == []
    assert conversation.cache.get_seq_length() == conversation.memory.document_length
    assert conversation.say(MESSAGES[0]) == first


def test_a_stream_is_the_reply(make_conversation: Any) -> None:
    one, other = make_conversation(), make_conversation()
    for message in MESSAGES:
        assert "".join(one.stream(message)) == other.say(message)


def test_a_turn_that_is_not_read_to_its_end_is_forgotten(make_conversation: Any) -> None:
    conversation, other = make_conversation(), make_conversation()
    conversation.say(MESSAGES[0])
    other.say(MESSAGES[0])
    conversation.max_new_tokens = 200
    pieces = conversation.stream("Never mind.")
    next(pieces)
    pieces.close()
    conversation.max_new_tokens = 5
    assert conversation.messages == other.messages
    assert conversation.say(MESSAGES[1]) == other.say(MESSAGES[1])


def test_a_turn_that_fails_is_forgotten(make_conversation: Any) -> None:
    conversation, other = make_conversation(), make_conversation()
    conversation.say(MESSAGES[0])
    other.say(MESSAGES[0])
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of luck")

    handle = conversation.model.network.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        conversation.say("Fail, please.")
    handle.remove()
    assert conversation.messages == other.messages
    assert conversation.say(MESSAGES[1]) == other.say(MESSAGES[1])


def test_the_same_message_twice(make_conversation: Any) -> None:
    conversation = make_conversation()
    for _ in range(3):
        reply = conversation.say("Who?")
        last = conversation.messages.pop()
        assert reply == plain_reply(conversation)
        conversation.messages.append(last)


def test_the_memory_is_never_written(make_conversation: Any) -> None:
    conversation = make_conversation()
    before = [layer.keys.clone() for layer in conversation.memory.layers]
    for message in MESSAGES:
        conversation.say(message)
    for layer, keys in zip(conversation.memory.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)


def test_a_tokenizer_without_a_template_is_refused(network: Any, make_tokenizer: Any, make_full: Any) -> None:
    model = Model(network, make_tokenizer(None), name="base model")
    with pytest.raises(ModelError, match="base model has no chat template: ask single questions"):
        Conversation(model, make_full(model))


def test_a_memory_of_another_model_is_refused(make_network: Any, tokenizer: Any, make_full: Any) -> None:
    memory: Memory = make_full(Model(make_network("llama", seed=1), tokenizer))
    with pytest.raises(MemoryMismatchError):
        Conversation(Model(make_network("llama"), tokenizer), memory)
