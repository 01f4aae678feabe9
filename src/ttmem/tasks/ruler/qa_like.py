"""Generated stand-ins for SQuAD and HotpotQA ("qa-like"): passages about invented works and people, and questions.

Every value of a passage is drawn at random, so that only the document can tell it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from ttmem.tasks.ruler.passages import Asked
from ttmem.tasks.vocabulary import Names

Values = dict[str, str]


@dataclass(frozen=True)
class Statement:
    """A sentence of a passage, a question that it answers, and the slot that is the answer."""

    sentence: str
    question: str
    answer: str


@dataclass(frozen=True)
class Subject:
    """What a passage can be about.

    title: its name. lead, close: sentences that nobody asks about. statements: the others.
    maker: how a question speaks of the person behind the work, None where there is none.
    """

    title: str
    lead: str
    statements: tuple[Statement, ...]
    close: str
    maker: str | None = None


WORKS = (
    Subject(
        "{place} Bridge",
        "The {title} is a road bridge across the River {river}.",
        (
            Statement("It was designed by the engineer {person}.", "Who designed the {title}?", "person"),
            Statement("Work on it began in {year}.", "In what year did work on the {title} begin?", "year"),
            Statement("The bridge is {number} metres long.", "How many metres long is the {title}?", "number"),
            Statement("Its stone came from {town}.", "Where did the stone for the {title} come from?", "town"),
            Statement("The first to cross it was {guest}.", "Who was the first to cross the {title}?", "guest"),
        ),
        "Before the bridge was built, travellers had to wait for a ferry, which did not run in winter.",
        "the engineer who designed the {title}",
    ),
    Subject(
        "{place} Museum",
        "The {title} is a museum of local history in the old quarter of the town.",
        (
            Statement("It was founded by the collector {person}.", "Who founded the {title}?", "person"),
            Statement("It first opened its doors in {year}.", "In what year did the {title} first open?", "year"),
            Statement("Its collection holds {number} clocks.", "How many clocks does the {title} hold?", "number"),
            Statement("A branch of it was set up in {town}.", "Where was a branch of the {title} set up?", "town"),
            Statement("Its present director is {guest}.", "Who is the present director of the {title}?", "guest"),
        ),
        "Schools visit it free of charge, and its reading room is open to everyone on weekdays.",
        "the collector who founded the {title}",
    ),
    Subject(
        "{place} Symphony",
        "The {title} is a work for large orchestra in four movements.",
        (
            Statement("It was written by the composer {person}.", "Who wrote the {title}?", "person"),
            Statement("It was first performed in {year}.", "In what year was the {title} first performed?", "year"),
            Statement("The score has {number} pages.", "How many pages does the score of the {title} have?", "number"),
            Statement("The first performance was given in {town}.", "Where was the {title} first performed?", "town"),
            Statement("The conductor that evening was {guest}.", "Who conducted the {title} first?", "guest"),
        ),
        "Critics praised the slow movement, and it has been played at many festivals since then.",
        "the composer who wrote the {title}",
    ),
    Subject(
        "{place} Observatory",
        "The {title} is a research station on a hill above the town.",
        (
            Statement("It was built for the astronomer {person}.", "For whom was the {title} built?", "person"),
            Statement("Its telescope was installed in {year}.", "When did the {title} get its telescope?", "year"),
            Statement("Here {number} comets were found.", "How many comets were found at the {title}?", "number"),
            Statement("Its lenses were ground in {town}.", "Where were the lenses of the {title} ground?", "town"),
            Statement("The night watch is led by {guest}.", "Who leads the night watch of the {title}?", "guest"),
        ),
        "On clear nights visitors may look at the planets, though the road up the hill is steep.",
        "the astronomer for whom the {title} was built",
    ),
    Subject(
        "{place} Railway",
        "The {title} is a narrow-gauge line that once carried timber and now carries tourists.",
        (
            Statement("It was planned by the surveyor {person}.", "Who planned the {title}?", "person"),
            Statement("The first train ran in {year}.", "In what year did the first train of the {title} run?", "year"),
            Statement("The line passes through {number} cuttings.", "How many cuttings are on the {title}?", "number"),
            Statement("Its northern terminus is {town}.", "What is the northern terminus of the {title}?", "town"),
            Statement("Its last stationmaster was {guest}.", "Who was the last stationmaster of the {title}?", "guest"),
        ),
        "A society of volunteers looks after the engines, and the carriages have been painted again.",
        "the surveyor who planned the {title}",
    ),
    Subject(
        "{place} Statue",
        "The {title} is a bronze figure in the market square.",
        (
            Statement("It was made by the sculptor {person}.", "Who made the {title}?", "person"),
            Statement("It was unveiled in {year}.", "In what year was the {title} unveiled?", "year"),
            Statement("It weighs {number} tons.", "How many tons does the {title} weigh?", "number"),
            Statement("The bronze was cast in {town}.", "Where was the bronze of the {title} cast?", "town"),
            Statement("The figure was modelled on {guest}.", "On whom was the {title} modelled?", "guest"),
        ),
        "It was moved twice when the square was paved, and its plinth was replaced after a storm.",
        "the sculptor who made the {title}",
    ),
)
PERSON = Subject(
    "{person}",
    "{person} came from a family of modest means and showed talent early.",
    (
        Statement("{person} was born in {town}.", "In which town was {maker} born?", "town"),
        Statement("The year of birth was {year}.", "In what year was {maker} born?", "year"),
        Statement("After school came years of study in {river}.", "In which town did {maker} study?", "river"),
        Statement("The most important teacher was {guest}.", "Who was the most important teacher of {maker}?", "guest"),
    ),
    "Letters to friends, of which many survive, tell of long walks and of a dislike of travel.",
)


@dataclass(frozen=True)
class OneHop:
    """Like SQuAD: one passage answers the question."""

    most: int | None = None

    def asked(self, rng: random.Random, index: int) -> Asked:
        names = Names(rng)
        work, values = rng.choice(WORKS), _values(names)
        statement = rng.choice(work.statements)
        return Asked(
            statement.question.format(title=work.title.format(**values)),
            (values[statement.answer],),
            (_passage(rng, work, values),),
            self._others(rng, names),
        )

    def _others(self, rng: random.Random, names: Names) -> Iterator[str]:
        while True:
            yield _passage(rng, rng.choice(WORKS), _values(names))


@dataclass(frozen=True)
class TwoHops:
    """Like HotpotQA: one passage names the person behind a work, another one tells what is asked about that person."""

    most: int | None = None

    def asked(self, rng: random.Random, index: int) -> Asked:
        names = Names(rng)
        work, values = rng.choice(WORKS), _values(names)
        person = _values(names) | {"person": values["person"]}
        statement = rng.choice(PERSON.statements)
        maker = str(work.maker).format(title=work.title.format(**values))
        return Asked(
            statement.question.format(maker=maker),
            (person[statement.answer],),
            (_titled(rng, work, values), _titled(rng, PERSON, person)),
            self._others(rng, names),
        )

    def _others(self, rng: random.Random, names: Names) -> Iterator[str]:
        """Passages about other works and about people who are behind none of them, in turn."""
        while True:
            yield _titled(rng, rng.choice(WORKS), _values(names))
            yield _titled(rng, PERSON, _values(names))


def _values(names: Names) -> Values:
    """A value for every slot, all of them new."""
    return {
        "place": names.place(),
        "river": names.place(),
        "town": names.place(),
        "person": names.person(),
        "guest": names.person(),
        "year": str(names.rng.randint(1700, 1949)),
        "number": str(names.rng.randint(21, 989)),
    }


def _passage(rng: random.Random, subject: Subject, values: Values) -> str:
    filled = values | {"title": subject.title.format(**values)}
    statements = rng.sample(subject.statements, len(subject.statements))
    sentences = [subject.lead, *(statement.sentence for statement in statements), subject.close]
    return " ".join(sentence.format(**filled) for sentence in sentences)


def _titled(rng: random.Random, subject: Subject, values: Values) -> str:
    return f"{subject.title.format(**values)}\n{_passage(rng, subject, values)}"
