"""Generated stand-ins for BABILong: facts in the manner of bAbI, hidden in essays or in noise, scored in its way."""

from __future__ import annotations

from dataclasses import dataclass

from ttmem.errors import TaskError
from ttmem.tasks.babi_world import STORIES
from ttmem.tasks.babilong import default_head, hidden_example, labels_match
from ttmem.tasks.babilong_labels import LABELS
from ttmem.tasks.haystack import essay_prose, plant
from ttmem.tasks.ruler.niah import NOISE
from ttmem.tasks.sizing import check_request, example_random, fit_example
from ttmem.tasks.task import Encode, Example, Question

BACKGROUNDS = ("essays", "noise")


@dataclass(frozen=True)
class Babi:
    """A story of "qa1" to "qa5" between the sentences of a background, its facts in their order.

    background: "essays", or "noise" (RULER's five sentences again and again).
    """

    task: str
    background: str = "essays"

    def __post_init__(self) -> None:
        if self.task not in STORIES:
            raise TaskError(f"there are no generated facts for {self.task!r}, only for {', '.join(STORIES)}")
        if self.background not in BACKGROUNDS:
            raise TaskError(f"{self.name}: background {self.background!r} is not one of {', '.join(BACKGROUNDS)}")

    @property
    def name(self) -> str:
        return f"babi_{self.task}"

    def example(self, encode: Encode, length: int, index: int, seed: int) -> Example:
        """Story `index` in at most `length` tokens. Raises TaskError when its facts do not fit."""
        check_request(self.name, length, index)
        rng = example_random(self.name, seed, index)
        story = STORIES[self.task](rng)
        depths = sorted(rng.random() for _ in story.facts)
        facts = [f" {fact}" for fact in story.facts]
        head = default_head(self.task)
        prose = essay_prose(seed + index) if self.background == "essays" else None

        def build(sentences: int) -> Example:
            pieces = prose.first_pieces(sentences) if prose else [f"\n{NOISE}"] * sentences
            gaps = [int(depth * (sentences + 1)) for depth in depths]
            return hidden_example(head, "".join(plant(pieces, facts, gaps)), story.question, story.answer)

        return fit_example(self.name, build, encode, length, least=1)

    def score(self, answer: str, question: Question) -> float:
        """1 if the answer's first sentence names the right label and no other: see `labels_match`."""
        return labels_match(answer, question, LABELS[self.task])
