"""Conversations that compact themselves: with nothing lost they say what others say, and what they fold they tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ttmem import BudgetError, LatentSettings, MemoryMismatchError, Model, ModelError, QuestionError
from ttmem.compaction.chain import Chain
from ttmem.conversation import Conversation
from ttmem.long_conversation import Folding, LongConversation

ALL_BUT_LETTERS = [i for i in range(300) if not (32 <= i < 94 or 258 <= i < 274)]
OPTIONS: dict[str, Any] = {"suppress_tokens": ALL_BUT_LETTERS}  # replies survive decoding and encoding
MESSAGES = ["Who keeps the lamps?", "And when?", "Where is the boat?", "How many bells?", "Why?", "Who rows?"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COUNTING = TEMPLATE.replace("<|im_start|>{{", "({{ messages | length }})<|im_start|>{{")
WHOLE = Folding(threshold=70, keep=45, ratios=(1.0,))


@pytest.fixture
def make_model(make_network: Any, make_tokenizer: Any) -> Callable[..., Model]:
    def make(architecture: str = "llama", template: str = TEMPLATE) -> Model:
        return Model(make_network(architecture), make_tokenizer(template))

    return make


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, quick_settings: LatentSettings) -> None:
    from ttmem.compaction import settings

    monkeypatch.setitem(settings.PRESETS, "quick", replace(quick_settings, fit_updates=1, distill_updates=1))


def talk(conversation: Conversation) -> list[str]:
    conversation.generate, conversation.max_new_tokens = OPTIONS, 5
    return [conversation.say(message) for message in MESSAGES]


@pytest.mark.parametrize("system", [None, "Be brief, and say so."])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_folding_without_loss_changes_no_reply(
    make_model: Any, make_full: Any, architecture: str, system: str | None
) -> None:
    model = make_model(architecture)
    memory = make_full(model)
    plain = talk(Conversation(model, memory, system=system))
    folding = LongConversation(model, memory, system=system, folding=WHOLE)
    assert talk(folding) == plain
    assert len(folding.folds) >= 2
    held = len(folding._opening()) + sum(fold.tokens for fold in folding.folds)
    assert folding.memory.document_length == memory.document_length + held


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_without_a_document(make_model: Any, system: str | None) -> None:
    model = make_model()
    never = talk(LongConversation.start(model, system, folding=Folding(10_000, 60)))
    folding = LongConversation.start(model, system, folding=WHOLE)
    assert talk(folding) == never
    assert folding.folds
    assert len(folding.chain.base.tokens) == (len(folding._before(1)) if system else 1)


def test_parts_shrink_with_age(make_model: Any, make_full: Any) -> None:
    model = make_model()
    memory = make_full(model)
    conversation = LongConversation(model, memory, folding=Folding(50, 40, ratios=(2.0, 4.0, 8.0)))
    talk(conversation)
    assert len(conversation.folds) >= 4
    for count, fold in enumerate(conversation.folds, start=1):
        assert [ratio for _, ratio in fold.parts] == [8.0] * (count - 3) + [8.0, 4.0, 2.0][-min(count, 3) :]
        assert fold.messages % 2 == 0
        assert fold.seconds > 0
    last = conversation.folds[-1]
    heads = sum(layer.num_heads for layer in memory.compacted)
    kept = sum(max(4, int(tokens / ratio)) for tokens, ratio in last.parts)
    assert last.entries == conversation.memory.entries == memory.entries + kept * heads
    assert conversation.folded == sum(fold.messages for fold in conversation.folds)


def test_reset_forgets_what_was_folded(make_model: Any, make_full: Any) -> None:
    model = make_model()
    memory = make_full(model)
    conversation = LongConversation(model, memory, folding=WHOLE)
    first = talk(conversation)
    conversation.reset()
    assert conversation.memory is memory
    assert conversation.folds == []
    assert talk(conversation) == first


def test_an_interrupted_folding_changes_nothing(
    make_model: Any, make_full: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    conversation = LongConversation(model, make_full(model), folding=WHOLE)
    expected = talk(LongConversation(model, make_full(model), folding=WHOLE))
    conversation.generate, conversation.max_new_tokens = OPTIONS, 5
    append = Chain.append
    failed = 0
    for message, reply in zip(MESSAGES, expected, strict=True):
        with monkeypatch.context() as patch:

            def interrupt(self: Chain, *rest: Any) -> None:
                append(self, *rest)
                raise KeyboardInterrupt

            patch.setattr(Chain, "append", interrupt)
            before = conversation.memory, conversation.folded, list(conversation.messages)
            try:
                assert conversation.say(message) == reply
                continue
            except KeyboardInterrupt:
                failed += 1
        assert (conversation.memory, conversation.folded, conversation.messages) == before
        assert conversation.say(message) == reply
    assert failed == len(conversation.folds) >= 2


def test_templates_that_render_turns_anew_are_refused(make_model: Any, make_full: Any) -> None:
    model = make_model(template=COUNTING)
    conversation = LongConversation(model, make_full(model), folding=WHOLE)
    with pytest.raises(ModelError, match="renders earlier turns anew"):
        talk(conversation)


def test_a_message_that_is_too_long_by_itself_stays_whole(make_model: Any, make_full: Any) -> None:
    model = make_model()
    conversation = LongConversation(model, make_full(model), folding=WHOLE, generate=OPTIONS, max_new_tokens=5)
    conversation.say("word " * 200)
    assert conversation.folds == []
    assert conversation.fold() is not None or conversation.folded == 0


def test_the_system_message_stays_whole(make_model: Any, make_full: Any) -> None:
    model = make_model()
    memory = make_full(model)
    conversation = LongConversation(model, memory, system="Be brief.", folding=Folding(50, 40, ratios=(2.0, 4.0)))
    opening = conversation.memory.document_length - memory.document_length
    assert opening == len(conversation._opening()) > 0
    talk(conversation)
    assert conversation.folds[0].messages % 2 == 0
    for layer, before in zip(conversation.memory.compacted, memory.compacted, strict=True):
        assert min(layer.lengths) >= before.lengths[0] + opening
    conversation.reset()
    assert conversation.memory.document_length == memory.document_length + opening


def test_a_system_message_inside_the_first_turn_is_folded_with_it(make_model: Any, make_full: Any) -> None:
    template = (
        "{% if messages[0]['role'] == 'system' and messages | length == 1 %}{{ raise_exception('no user') }}{% endif %}"
        "{% for m in messages %}{% if m['role'] != 'system' %}<|im_start|>{{ m['role'] }}\n"
        "{% if loop.index0 == 1 and messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}\n{% endif %}"
        "{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    model = make_model(template=template)
    plain = talk(LongConversation.start(model, "Be brief.", folding=Folding(10_000, 60)))
    folding = LongConversation.start(model, "Be brief.", folding=WHOLE)
    assert talk(folding) == plain
    assert folding.folds


def test_before_any_turn_there_is_nothing_to_fold(make_model: Any, make_full: Any) -> None:
    model = make_model()
    for conversation in (LongConversation(model, make_full(model)), LongConversation.start(model, "Be brief.")):
        assert conversation.fold_when_long() is None
        assert conversation.fold() is None


def test_memories_that_cannot_be_joined_are_refused(make_model: Any, make_full: Any) -> None:
    model = make_model()
    memory = make_full(model)
    for bad in (replace(memory, merging="equal"), replace(memory, document_length=7)):
        with pytest.raises(MemoryMismatchError):
            LongConversation(model, bad)


def test_a_message_that_is_no_text(make_model: Any, make_full: Any) -> None:
    model = make_model()
    conversation = LongConversation(model, make_full(model), folding=WHOLE)
    with pytest.raises(QuestionError, match="not text"):
        conversation.say("\udcff")
    assert conversation.messages == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((100, 10, (float("nan"),)), "ratios"),
        ((100, 10, (8.0,), "quick", "snapkv"), "snapkv"),
        ((100, 100), "fewer"),
        ((100, -1), "at least 0"),
        ((100, 10, ()), "ratios"),
        ((100, 10, (8.0, 4.0)), "not fall"),
    ],
)
def test_bad_settings(settings: tuple[Any, ...], said: str) -> None:
    with pytest.raises(BudgetError, match=said):
        Folding(*settings)
