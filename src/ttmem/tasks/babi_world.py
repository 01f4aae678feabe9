"""Small worlds in the manner of bAbI's first five tasks (Weston et al., 2015): facts, a question, its answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

PEOPLE = ("Daniel", "John", "Mary", "Sandra")
GIVERS = ("Bill", "Fred", "Jeff", "Mary")
PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
OPPOSITES = {"north": "south", "south": "north", "east": "west", "west": "east"}
MOVES = ("moved to", "went to", "travelled to", "journeyed to", "went back to")
TAKES = ("took", "got", "picked up", "grabbed")
DROPS = ("dropped", "discarded", "put down", "left")
GIVES = ("gave", "passed", "handed")


@dataclass(frozen=True)
class Story:
    """Facts in the order in which they happen, a question about them, and its answer, one word."""

    facts: tuple[str, ...]
    question: str
    answer: str


@dataclass
class World:
    """People who walk about, take things, drop them and give them away, and the facts that tell it.

    place: of a person, once known. holder: of a thing that is carried. path: the places of a thing, once it was taken.
    given: (giver, thing, receiver) of every gift.
    """

    rng: random.Random
    people: tuple[str, ...] = PEOPLE
    facts: list[str] = field(default_factory=list)
    place: dict[str, str] = field(default_factory=dict)
    holder: dict[str, str] = field(default_factory=dict)
    path: dict[str, list[str]] = field(default_factory=dict)
    given: list[tuple[str, str, str]] = field(default_factory=list)

    def move(self) -> None:
        person = self.rng.choice(self.people)
        place = self.rng.choice([place for place in PLACES if place != self.place.get(person)])
        self.place[person] = place
        for thing in THINGS:
            if self.holder.get(thing) == person:
                self.path[thing].append(place)
        self.facts.append(f"{person} {self.rng.choice(MOVES)} the {place}.")

    def handle(self) -> None:
        """Take a thing that is free and within reach, or drop one. A thing nobody has taken yet may lie anywhere."""
        person = self.rng.choice(self.people)
        if person not in self.place:
            return self.move()
        here = self.place[person]
        carried = [thing for thing in THINGS if self.holder.get(thing) == person]
        free = [thing for thing in THINGS if thing not in self.holder and self.path.get(thing, [here])[-1] == here]
        if free and (not carried or self.rng.random() < 0.5):
            thing = self.rng.choice(free)
            self.holder[thing] = person
            self.path.setdefault(thing, [here])
            self.facts.append(f"{person} {self.rng.choice(TAKES)} the {thing} there.")
        elif carried:
            thing = self.rng.choice(carried)
            del self.holder[thing]
            self.facts.append(f"{person} {self.rng.choice(DROPS)} the {thing} there.")
        else:
            self.move()
        return None

    def give(self) -> None:
        """Give away a carried thing, or take one."""
        carried = [thing for thing in THINGS if thing in self.holder]
        if not carried:
            return self.handle()
        thing = self.rng.choice(carried)
        giver = self.holder[thing]
        receiver = self.rng.choice([person for person in self.people if person != giver])
        self.holder[thing] = receiver
        self.given.append((giver, thing, receiver))
        self.facts.append(f"{giver} {self.rng.choice(GIVES)} the {thing} to {receiver}.")
        return None

    def live(self, events: int, *kinds: Callable[[], None]) -> None:
        for _ in range(events):
            self.rng.choice(kinds)()


def where_is_a_person(rng: random.Random) -> Story:
    """qa1: one fact supports the answer."""
    world = World(rng)
    world.live(rng.randint(2, 10), world.move)
    person, place = rng.choice(list(world.place.items()))
    return Story(tuple(world.facts), f"Where is {person}?", place)


def where_is_a_thing(rng: random.Random) -> Story:
    """qa2: two facts, who took the thing and where that person went."""
    world = World(rng)
    world.live(rng.randint(4, 20), world.move, world.handle)
    while not world.path:
        world.handle()
    thing, path = rng.choice(list(world.path.items()))
    return Story(tuple(world.facts), f"Where is the {thing}?", path[-1])


def where_was_a_thing(rng: random.Random) -> Story:
    """qa3: three facts, who took the thing and where that person went first and next."""
    world = World(rng)
    world.live(rng.randint(8, 30), world.move, world.handle)
    while not (askable := _askable_places(world)):
        world.live(2, world.move, world.handle)
    thing, position = rng.choice(askable)
    before, after = world.path[thing][position - 1 : position + 1]
    return Story(tuple(world.facts), f"Where was the {thing} before the {after}?", before)


def how_places_lie(rng: random.Random) -> Story:
    """qa4: of two relations, one supports the answer."""
    first, middle, last = rng.sample(PLACES, 3)
    direction = rng.choice(list(OPPOSITES))
    facts = [f"The {first} is {direction} of the {middle}.", f"The {middle} is {direction} of the {last}."]
    rng.shuffle(facts)
    question, answer = rng.choice(
        [
            (f"What is {direction} of the {middle}?", first),
            (f"What is the {middle} {direction} of?", last),
        ]
    )
    return Story(tuple(facts), question, answer)


def who_gave_what(rng: random.Random) -> Story:
    """qa5: a gift, asked for by two of its three parts or by the thing alone."""
    world = World(rng, GIVERS)
    world.live(rng.randint(6, 20), world.move, world.handle, world.give)
    while not (askable := _askable_gifts(world.given)):
        world.live(2, world.move, world.handle, world.give)
    return Story(tuple(world.facts), *rng.choice(askable))


STORIES: dict[str, Callable[[random.Random], Story]] = {
    "qa1": where_is_a_person,
    "qa2": where_is_a_thing,
    "qa3": where_was_a_thing,
    "qa4": how_places_lie,
    "qa5": who_gave_what,
}


def _askable_places(world: World) -> list[tuple[str, int]]:
    """Things, and positions of their paths with a place that they came to only once."""
    return [
        (thing, position)
        for thing, path in world.path.items()
        for position in range(1, len(path))
        if path.count(path[position]) == 1
    ]


def _askable_gifts(given: list[tuple[str, str, str]]) -> list[tuple[str, str]]:
    """Questions about gifts, with answers, for which every gift that fits has the same answer."""
    answers: dict[str, set[str]] = {}
    for giver, thing, receiver in given:
        for question, answer in (
            (f"What did {giver} give to {receiver}?", thing),
            (f"Who gave the {thing} to {receiver}?", giver),
            (f"Who did {giver} give the {thing} to?", receiver),
            (f"Who gave the {thing}?", giver),
            (f"Who received the {thing}?", receiver),
        ):
            answers.setdefault(question, set()).add(answer)
    return [(question, found.pop()) for question, found in answers.items() if len(found) == 1]
