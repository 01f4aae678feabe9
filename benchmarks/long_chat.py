"""Facts of early turns, asked for after the conversation has been compacted, cut or summarised.

    python benchmarks/long_chat.py [--chats 3] [--turns 10] [--ratio 8] [--preset quick]

In every turn a user tells a piece of prose with two planted facts and asks for one of them, which the reply names;
behind all turns, the facts that nobody has asked for are. (Where replies are all alike, a small model goes on with such
replies instead of answering.) `whole` keeps every turn, `folded` compacts the older ones (`LongConversation`), `cut`
keeps only the latest turns, as many tokens as the others keep whole, and `summary` puts the model's own summary of the
older turns before these, of as many tokens as the folded part has entries per head.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from common import model_label, record

import ttmem
from ttmem.conversation import Conversation
from ttmem.generation import first_line
from ttmem.long_conversation import Folding, LongConversation
from ttmem.tasks.fact_kinds import Fact, make_facts
from ttmem.tasks.haystack import essay_prose
from ttmem.tasks.scoring import any_as_words
from ttmem.tasks.sizing import example_random
from ttmem.tasks.task import Question

REPLY = "Noted."
SUMMARISE = "Write down briefly all facts that I have told you: names, places, numbers and dates."
NEVER = 10**9


def turns(count: int, sentences: int, index: int, seed: int) -> tuple[list[dict[str, str]], list[Fact]]:
    """The messages of `count` turns, and of each the fact that is not asked for in it."""
    facts = make_facts(example_random("long chat", seed, index), 2 * count)
    pieces = essay_prose(seed + index).first_pieces(2 * count * sentences)
    prose = ["".join(pieces[start : start + sentences]).strip() for start in range(0, len(pieces), sentences)]
    messages = []
    for turn in range(count):
        kept, asked = facts[2 * turn : 2 * turn + 2]
        told = f"{prose[2 * turn]} {kept.sentence} {prose[2 * turn + 1]} {asked.sentence}"
        messages += [
            {"role": "user", "content": f"{told}\n\n{asked.question}"},
            {"role": "assistant", "content": asked.sentence},
        ]
    return messages, facts[::2]


def answers(conversation: Conversation, facts: list[Fact]) -> list[float]:
    """Scores of the questions, each asked behind the same turns."""
    scores = []
    for fact in facts:
        said = first_line(conversation.say(fact.question).strip())
        del conversation.messages[-2:]
        scores.append(any_as_words(said, Question(fact.question, fact.answers, 0).references))
    return scores


def systems(
    model: ttmem.Model, messages: list[dict[str, str]], arguments: argparse.Namespace
) -> dict[str, tuple[Conversation, dict[str, Any]]]:
    """Name -> the conversation, ready to be asked, and what is known of it."""
    greedy: dict[str, Any] = {"do_sample": False}

    def start(folding: Folding) -> LongConversation:
        return LongConversation.start(
            model, folding=folding, max_new_tokens=arguments.tokens, generate=dict(greedy), seed=arguments.seed
        )

    whole = start(Folding(NEVER, 0))
    whole.messages += messages
    folded = start(
        Folding(arguments.threshold, arguments.keep, (arguments.ratio,), arguments.preset, arguments.method)
    )
    began = time.perf_counter()
    for place in range(0, len(messages), 2):
        folded.messages += messages[place : place + 2]
        folded.fold_when_long()
    seconds = time.perf_counter() - began
    latest = messages[folded.folded :]
    cut = start(Folding(NEVER, 0))
    cut.messages += latest
    summary = start(Folding(NEVER, 0))
    budget = sum(int(tokens / ratio) for tokens, ratio in folded.folds[-1].parts) if folded.folds else 0
    if budget:
        summary.messages += messages[: folded.folded]
        summary.max_new_tokens = budget
        text = summary.say(SUMMARISE)
        summary.reset()
        summary.max_new_tokens = arguments.tokens
        summary.messages += [
            {"role": "user", "content": f"What I have told you so far: {text}"},
            {"role": "assistant", "content": REPLY},
        ]
    summary.messages += latest
    told = {"folded_messages": folded.folded, "seconds": seconds, "tokens_per_head": budget}
    return {"whole": (whole, {}), "folded": (folded, told), "cut": (cut, {}), "summary": (summary, {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=3)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--sentences", type=int, default=2, help="of prose before each fact")
    parser.add_argument("--threshold", type=int, default=768)
    parser.add_argument("--keep", type=int, default=256)
    parser.add_argument("--ratio", type=float, default=8)
    parser.add_argument("--preset", default="quick")
    parser.add_argument("--method", default="latent")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer")
    parser.add_argument("--model")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model = ttmem.load_model(arguments.model)
    rows: dict[str, list[dict[str, Any]]] = {}
    with ttmem.ConsoleProgress().stage("chats", arguments.chats) as advance:
        for index in range(arguments.chats):
            messages, facts = turns(arguments.turns, arguments.sentences, index, arguments.seed)
            found = systems(model, messages, arguments)
            early = found["folded"][1]["folded_messages"] // 2
            for name, (conversation, told) in found.items():
                scores = answers(conversation, facts)
                rows.setdefault(name, []).append({"early": scores[:early], "late": scores[early:], **told})
            advance(1)
    means = {
        name: {
            part: 100 * statistics.fmean(score for row in group for score in row[part])
            for part in ("early", "late")
            if any(row[part] for row in group)
        }
        for name, group in rows.items()
    }
    settings = {name: value for name, value in vars(arguments).items() if name != "model"}
    record(
        "long_chat",
        {"model": model_label(model.name), "settings": settings, "means": means, "chats": rows},
        arguments.seed,
    )


if __name__ == "__main__":
    main()
