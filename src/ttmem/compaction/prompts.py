"""Generic prompts that are asked about a document while its memory is trained or measured.

A memory is trained on what the model says about the document, so the prompts have to reach every kind of
content without knowing the document. Training prompts are the product of two short lists: a request names
what the answer is about, an instruction says how the answer is to be written. `HELD_OUT_PROMPTS` has other
requests in other words; it is there to measure how close a memory comes to the full cache and is never
trained on. `CHOICE_PROMPTS` choose between memories in training. `PASSAGE_AFTER` and `PASSAGE_AROUND` ask for a passage
of the document by words before it or in it.

Every prompt follows the document's raw text directly, so each one opens with a blank line.
"""

from __future__ import annotations

from typing import Final

_OPENING: Final = "\n\n"
_ANSWER_CUE: Final = "\nAnswer:"

DOCUMENT_REQUESTS: Final[tuple[str, ...]] = (
    # What the document says.
    "Summarize the document's main subject and structure.",
    "State the key facts that the document gives.",
    "Name the people and organizations in the document and say what each one does.",
    "List the places in the document and what happens at each of them.",
    "Report the numbers, amounts and measurements in the document and what they refer to.",
    "Give the dates and times in the document and the events that belong to them.",
    "Explain the terms that the document defines or uses in a special sense.",
    "Describe a process or procedure from the document step by step.",
    "Explain the causes that the document gives and the effects that follow from them.",
    "Compare two things that the document sets against each other.",
    "Describe the rules, conditions and exceptions in the document.",
    "Point out the questions that the document leaves open.",
    "Describe the problems in the document and how they are dealt with.",
    "State the claims that the document makes and the evidence for each.",
    "Describe how the people or things in the document are related to one another.",
    # How the document is organized.
    "List the document's sections or topics in the order in which they come.",
    "Describe what the beginning of the document is about.",
    "Describe what the middle of the document is about.",
    "Describe what the end of the document is about.",
    "Explain how the document moves from one topic to the next.",
    # How the document is written.
    "Describe the document's tone and the attitude of its author.",
    "Say for whom the document is written and what it expects them to know.",
    "Describe the document's vocabulary and the kind of sentences it uses.",
    "Continue the document in the same style and on the same subject.",
)

RESPONSE_INSTRUCTIONS: Final[tuple[str, ...]] = (
    "Answer briefly.",
    "Answer in one sentence and quote one exact detail.",
    "Give concrete names and values where the text has them.",
    "Write one full paragraph.",
    "Use a short bulleted list.",
    "Answer in a few words.",
    "Be as thorough as the text allows.",
    "Keep to the document's own wording.",
    "Answer in plain words that a newcomer would understand.",
    "Begin with the most important point.",
    "Answer in two or three sentences.",
    "Quote the passage that supports the answer.",
    "Number the points of the answer.",
    "Include details that are easy to overlook.",
    "Follow the order of the text.",
    "Use only what the document states.",
    "Give one example from the document.",
    "Write in a neutral and factual manner.",
    "Give the reason behind each point.",
    "Finish with a one-sentence conclusion.",
)

ROLLOUT_PROMPT_COUNT: Final = len(DOCUMENT_REQUESTS) * len(RESPONSE_INSTRUCTIONS)

HELD_OUT_PROMPTS: Final[tuple[str, ...]] = tuple(
    f"{_OPENING}{body}{_ANSWER_CUE}"
    for body in (
        "What is this text mainly about? Reply with a single sentence.",
        "Which details should a careful reader remember? Mention at least three.",
        "Who appears in the text, and in what role? Write each on its own line.",
        "Where do the events or activities in the text take place? Be specific.",
        "Which quantities does the text mention, and what do they measure? State the units too.",
        "What happens first, and what happens later? Put the events in sequence.",
        "What does the text say must not be done? Repeat its wording closely.",
        "Which responsibilities does the text assign, and to whom? Keep the reply compact.",
        "Why do things happen the way the text reports? Trace one chain of reasons.",
        "What changes over the course of the text? Contrast the earlier and the later state.",
        "Which special case does the text make allowance for? Explain when it applies.",
        "What would a reader still want to find out? Suggest two follow-up questions.",
        "Which objects, tools or materials come up in the text? Add what each is for.",
        "What reason does the text give for its advice or its conclusions? Discuss it in detail.",
        "Which part of the text is the most detailed? Retell that part.",
        "How would you divide this text into chapters? Propose a title for each.",
        "What does the opening paragraph tell the reader? Restate it in other words.",
        "What is said about halfway through the text? Retell it in a paragraph.",
        "How does the text close? Copy its final point.",
        "Could this text persuade someone who doubts it? Weigh its strengths and weaknesses.",
        "How formal is the writing? Support the judgement with a phrase from the text.",
        "What kind of publication might have printed this text? Justify the guess.",
        "Which words or phrases come back again and again? Collect them in a list.",
        "Write a headline and a short notice that announce this text to its readers.",
    )
)

CHOICE_PROMPTS: Final[tuple[str, ...]] = tuple(
    f"{_OPENING}{body}{_ANSWER_CUE}"
    for body in (
        "Tell me what this document is for. One sentence is enough.",
        "Pick one fact from the document and state it exactly.",
        "Mention a name that occurs in the document and what is said about it.",
        "Quote any sentence of the document and say what it means.",
        "Which number or date does the document give, and for what?",
        "Retell a passage from the second half of the document.",
        "What would someone who has read the document know now?",
        "Say in your own words what comes near the beginning of the document.",
    )
)
"""Asked to choose how a memory is trained: neither trained on nor used to report fidelity."""

PASSAGE_AFTER: Final[tuple[str, ...]] = (
    f'{_OPENING}Question: What does the text say after "{{cue}}"?{_ANSWER_CUE}',
    f"{_OPENING}The text above says:{{cue}}",
    f'{_OPENING}Q: How does the passage that contains "{{cue}}" go on?\nA:',
    f"{_OPENING}According to the document,{{cue}}",
    f"{_OPENING}Continue this passage of the text:{{cue}}",
)
"""Requests for what follows the words `cue`."""

PASSAGE_AROUND: Final[tuple[str, ...]] = (
    f"{_OPENING}Question: What does the text say about {{cue}}?{_ANSWER_CUE}",
    f"{_OPENING}Q: Where does the text mention {{cue}}?\nA:",
    f"{_OPENING}Find the sentence about {{cue}}:",
    f'{_OPENING}Quote the part of the text with "{{cue}}":',
    f"{_OPENING}What is said about {{cue}}?\n",
)
"""Requests for the passage that holds the words `cue`."""


def _prompt(request: str, instruction: str) -> str:
    return f"{_OPENING}{request} {instruction}{_ANSWER_CUE}"


def rollout_prompts(count: int = ROLLOUT_PROMPT_COUNT) -> list[str]:
    """Return `count` training prompts, in request-major order and without duplicates.

    The full count gives every pair of a request and an instruction. A smaller count gives a fixed subset in
    which the requests appear equally often and the instructions appear equally often, each to within one.

    Raises:
        ValueError: if `count` is below 1 or above the number of pairs, 480.
    """
    if not 1 <= count <= ROLLOUT_PROMPT_COUNT:
        raise ValueError(f"count must be between 1 and {ROLLOUT_PROMPT_COUNT}, got {count}")
    requests, instructions = len(DOCUMENT_REQUESTS), len(RESPONSE_INSTRUCTIONS)
    # A diagonal walk over the 24 x 20 grid closes after lcm(24, 20) = 120 steps, so each further lap starts
    # one instruction later; four laps visit every pair once. The stride of 5 makes even a few steps reach
    # requests about content, organization and style.
    pairs = sorted((5 * step % requests, (step + step // 120) % instructions) for step in range(count))
    return [_prompt(DOCUMENT_REQUESTS[row], RESPONSE_INSTRUCTIONS[column]) for row, column in pairs]


def replay_request(cue: str = "") -> str:
    """Return the request to repeat the document, or the part of it that starts with the text `cue`.

    The repeated text is scored directly after the request's final line break. A cue of nothing but white
    space counts as no cue.
    """
    if not cue.strip():
        return f"{_OPENING}Repeat the previous text exactly.\n"
    return f'{_OPENING}Repeat exactly the part of the previous text that starts with "{cue}".\n'
