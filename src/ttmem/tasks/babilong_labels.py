"""BABILong's 20 tasks: the labels that answers are made of, what the facts are about, and what an answer looks like."""

from __future__ import annotations

PLACES = frozenset({"bathroom", "bedroom", "garden", "hallway", "kitchen", "office"})
CITY_PLACES = frozenset({"bedroom", "cinema", "kitchen", "office", "park", "school"})
YES_NO = frozenset({"no", "yes"})

LABELS: dict[str, frozenset[str]] = {
    "qa1": PLACES,
    "qa2": PLACES,
    "qa3": PLACES,
    "qa4": PLACES,
    "qa5": frozenset({"Bill", "Fred", "Jeff", "Mary", "apple", "football", "milk"}),
    "qa6": YES_NO,
    "qa7": frozenset({"none", "one", "three", "two"}),
    "qa8": frozenset({"apple", "football", "milk", "nothing"}),
    "qa9": YES_NO,
    "qa10": YES_NO | {"maybe"},
    "qa11": PLACES,
    "qa12": PLACES,
    "qa13": PLACES,
    "qa14": CITY_PLACES,
    "qa15": frozenset({"cat", "mouse", "sheep", "wolf"}),
    "qa16": frozenset({"gray", "green", "white", "yellow"}),
    "qa17": YES_NO,
    "qa18": YES_NO,
    "qa19": frozenset(",".join(steps) for steps in "ee en es ne nn nw se ss sw wn ws ww".split()),
    "qa20": frozenset({"bedroom", "bored", "garden", "hungry", "kitchen", "thirsty", "tired"}),
}

WHERE_PEOPLE_ARE = "where people are"
TOPICS: dict[str, str] = {
    "qa1": WHERE_PEOPLE_ARE,
    "qa2": "where people are and what they carry",
    "qa3": "where people are and what they carry",
    "qa4": "how places lie to each other",
    "qa5": "what people give to each other",
    "qa6": WHERE_PEOPLE_ARE,
    "qa7": "what people carry",
    "qa8": "what people carry",
    "qa9": "where people are and are not",
    "qa10": "where people are or may be",
    "qa11": WHERE_PEOPLE_ARE,
    "qa12": WHERE_PEOPLE_ARE,
    "qa13": WHERE_PEOPLE_ARE,
    "qa14": "where people were at what time",
    "qa15": "animals and what they are afraid of",
    "qa16": "animals and their colours",
    "qa17": "how coloured shapes lie to each other",
    "qa18": "the sizes of things",
    "qa19": "how places lie to each other",
    "qa20": "how people feel and where they go",
}

ONE_PLACE = "Answer with one word, the place."
YES_OR_NO = 'Answer with one word, "yes" or "no".'
FORMATS: dict[str, str] = {
    "qa1": ONE_PLACE,
    "qa2": ONE_PLACE,
    "qa3": ONE_PLACE,
    "qa4": ONE_PLACE,
    "qa5": "Answer with one word, the person or the thing.",
    "qa6": YES_OR_NO,
    "qa7": 'Answer with one word, the number: "none", "one", "two" or "three".',
    "qa8": 'Answer with the things, separated by commas, or with "nothing".',
    "qa9": YES_OR_NO,
    "qa10": 'Answer with one word, "yes", "no" or "maybe".',
    "qa11": ONE_PLACE,
    "qa12": ONE_PLACE,
    "qa13": ONE_PLACE,
    "qa14": ONE_PLACE,
    "qa15": "Answer with one word, the animal.",
    "qa16": "Answer with one word, the colour.",
    "qa17": YES_OR_NO,
    "qa18": YES_OR_NO,
    "qa19": 'Answer with two directions of "n", "s", "e" and "w", separated by a comma, such as "n,e".',
    "qa20": "Answer with one word, the feeling or the place.",
}
