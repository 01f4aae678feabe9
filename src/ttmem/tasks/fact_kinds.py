"""Kinds of facts: a plain sentence about an invented place, and a question worded like it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from ttmem.tasks.vocabulary import Names

JOBS = (
    "baker|blacksmith|harbour master|lighthouse keeper|head gardener|postmaster|stationmaster|chief surgeon|"
    "schoolmaster|night porter|church organist|town clerk|head librarian|ferry pilot|master brewer|beekeeper|"
    "bookbinder|clockmaker|fire warden|museum curator|opera conductor|potter|saddler|sexton|shipwright|tailor"
).split("|")
COUNTED = (
    "library|books;orchard|apple trees;hotel|rooms;school|pupils;theatre|seats;harbour|boats;museum|paintings;"
    "stable|horses;vineyard|barrels;castle|windows;choir|singers;hospital|beds;bakery|ovens"
).split(";")
DATED = "bridge|market hall|town library|railway station|botanical garden|swimming hall|art school|harbour".split("|")
BUILT = ("chapel|castle|town hall|water mill|stone tower|monastery|windmill|city gate|customs house|courthouse").split(
    "|"
)
EVENTS = (
    "flower show|cheese fair|boat race|kite festival|book fair|horse market|wine festival|film festival|"
    "chess tournament|sheepdog trial|poetry contest|harvest supper|lantern parade|winter carnival|"
    "puppet festival|pottery market|brass band contest|apple festival|fencing tournament|bicycle race|air show|"
    "beard contest|regatta|ploughing match"
).split("|")
PAINTED = "inn|bakery|school|post office|bank|theatre|pharmacy|boathouse|fire station|mill|chapel|tavern".split("|")
COLOURS = (
    "red|green|blue|yellow|black|white|purple|orange|pink|grey|brown|silver|violet|turquoise|crimson|scarlet|"
    "golden|maroon|indigo|ivory|cream|teal|copper|olive"
).split("|")
SECRETS = "vault|harbour office|bank|observatory|archive|garrison|signal station|treasury|laboratory|arsenal".split("|")
CODE_WORDS = (
    "acorn anchor anvil apricot badger basket beacon biscuit blanket bonfire bramble candle canyon cedar chimney "
    "cobalt comet coral cricket crystal dagger dolphin ember falcon feather ferret fiddle forest gander garnet "
    "ginger granite hammer harvest hazel heron hornet jasmine kettle lantern lemon lobster magnet marble meadow "
    "mirror needle nutmeg orchid otter oyster paddle pepper pigeon plover pumpkin quartz raven ribbon saddle "
    "saffron salmon sparrow spider sunset thimble thistle thunder tiger trumpet tulip turnip velvet walnut "
    "willow window zebra"
).split()
OWNED = "farm|hotel|vineyard|shipyard|quarry|sawmill|brewery|tannery|mine|circus|newspaper|glassworks".split("|")
TICKETS = "museum|aquarium|opera|castle|steam railway|planetarium|wax museum|cable car|zoo|theatre|ferry".split("|")
HEIGHTS = "lighthouse|clock tower|waterfall|statue|church steeple|radio mast|cliff|monument|chimney|dam".split("|")
WEIGHED = "church bell|anchor|cannon|bronze lion|millstone|safe|meteorite|organ|cheese press|anvil".split("|")
MEETINGS = ("chess club|book club|gardening class|dance class|history society|drawing class|choir|debating club").split(
    "|"
)


@dataclass(frozen=True)
class Fact:
    """A sentence, a question that it answers, and the answers that count."""

    sentence: str
    question: str
    answers: tuple[str, ...]


def make_facts(rng: random.Random, count: int) -> list[Fact]:
    """`count` facts about distinct things with distinct answers, of kinds in random order, each kind equally often."""
    names = Names(rng)
    kinds: list[Callable[[Names], Fact]] = []
    while len(kinds) < count:
        kinds += rng.sample(KINDS, len(KINDS))
    return [kind(names) for kind in kinds[:count]]


def _job(names: Names) -> Fact:
    job, place, person = names.rng.choice(JOBS), names.place(), names.person()
    question = f"What is the name of the {job} at {place}?"
    return Fact(f"The name of the {job} at {place} is {person}.", question, (person,))


def _quantity(names: Names) -> Fact:
    holder, things = names.rng.choice(COUNTED).split("|")
    place, number = names.place(), names.number(30, 999)
    question = f"How many {things} does the {holder} at {place} have?"
    return Fact(f"The {holder} at {place} has {number} {things}.", question, (number,))


def _date(names: Names) -> Fact:
    thing, place, date = names.rng.choice(DATED), names.place(), names.date()
    question = f"On what date was the {thing} at {place} opened?"
    return Fact(f"The {thing} at {place} was opened on {date[0]}.", question, date)


def _year(names: Names) -> Fact:
    thing, place, year = names.rng.choice(BUILT), names.place(), names.number(1400, 1899)
    question = f"In what year was the {thing} at {place} built?"
    return Fact(f"The {thing} at {place} was built in {year}.", question, (year,))


def _place(names: Names) -> Fact:
    event, place = names.one_of(EVENTS), names.place()
    return Fact(f"The annual {event} is held in {place}.", f"Where is the annual {event} held?", (place,))


def _colour(names: Names) -> Fact:
    house, place, colour = names.rng.choice(PAINTED), names.place(), names.one_of(COLOURS)
    question = f"What is the colour of the door of the {house} at {place}?"
    return Fact(f"The colour of the door of the {house} at {place} is {colour}.", question, (colour,))


def _code_word(names: Names) -> Fact:
    office, place, word = names.rng.choice(SECRETS), names.place(), names.one_of(CODE_WORDS)
    question = f"What is the code word for the {office} at {place}?"
    return Fact(f'The code word for the {office} at {place} is "{word}".', question, (word,))


def _owner(names: Names) -> Fact:
    property_, place, person = names.rng.choice(OWNED), names.place(), names.person()
    question = f"Who owns the {property_} at {place}?"
    return Fact(f"The {property_} at {place} is owned by {person}.", question, (person,))


def _price(names: Names) -> Fact:
    sight, place, number = names.rng.choice(TICKETS), names.place(), names.number(11, 99)
    question = f"How much does a ticket for the {sight} at {place} cost?"
    return Fact(f"A ticket for the {sight} at {place} costs {number} crowns.", question, (number,))


def _height(names: Names) -> Fact:
    thing, place, number = names.rng.choice(HEIGHTS), names.place(), names.number(30, 999)
    question = f"How many feet high is the {thing} at {place}?"
    return Fact(f"The {thing} at {place} is {number} feet high.", question, (number,))


def _weight(names: Names) -> Fact:
    thing, place, number = names.rng.choice(WEIGHED), names.place(), names.number(100, 999)
    question = f"How many pounds does the {thing} at {place} weigh?"
    return Fact(f"The {thing} at {place} weighs {number} pounds.", question, (number,))


def _room(names: Names) -> Fact:
    club, place, number = names.rng.choice(MEETINGS), names.place(), names.number(100, 999)
    question = f"In which room does the {club} at {place} meet?"
    return Fact(f"The {club} at {place} meets in room {number}.", question, (number,))


KINDS = (_job, _quantity, _date, _year, _place, _colour, _code_word, _owner, _price, _height, _weight, _room)
MOST_FACTS = len(COLOURS) * len(KINDS)
"""No kind may run out of answers, and colours are the fewest."""
