"""Invented names, places and dates for generated documents: natural to read, too many to guess."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from ttmem.errors import TaskError

FIRST_NAMES = (
    "Ada Agnes Albert Alma Amos Anton Arthur Astrid Basil Beatrice Bernard Bruno Caleb Carl Cecil Clara Conrad Cora "
    "Daphne Dora Edgar Edith Edmund Edwin Eleanor Elias Ellen Elsa Emil Ernest Esther Felix Flora Frances Gilbert "
    "Gloria Greta Gustav Harold Harriet Hazel Hector Helen Henry Hilda Hugo Ida Ingrid Irene Isaac Ivan Jasper Julian "
    "Karin Klara Laura Leonard Lewis Louis Lucy Lydia Mabel Marcus Margaret Martin Matilda Maurice Miriam Nora Norman "
    "Olga Oscar Otto Patrick Paula Philip Ralph Rosa Rupert Ruth Samuel Sarah Silas Simon Stella Sylvia Theodor "
    "Thomas Ursula Vera Victor Viola Walter Wanda Wilfred Winifred"
).split()
LAST_NAMES = (
    "Abbott Aldridge Ashby Atwood Barlow Barrett Beckett Benson Birch Blackwood Boyd Bramwell Briggs Burke Calder "
    "Carver Castell Chandler Clayton Colby Conway Cooke Crane Crosby Dalton Davenport Dawson Dexter Drake Dunlop "
    "Easton Eldridge Emerson Fairfax Farrow Fenwick Finch Fletcher Forsyth Foster Garland Gibson Godwin Graves "
    "Griffin Hale Hammond Hargrove Harlow Hastings Hawkins Hayward Holbrook Holt Howell Hurst Ingram Irving Jarvis "
    "Keating Kendall Kirby Lambert Langley Larkin Lawson Lennox Lockwood Lowell Marlow Marsh Mercer Merrick Morley "
    "Nash Newell Norwood Oakley Ogden Osborne Paxton Pembroke Perkins Pickett Porter Prescott Quinn Radford Ramsey "
    "Redmond Ridley Rowland Rutledge Sanders Sawyer Selby Shaw Sheldon Spencer Stanton Sterling Stoddard Sutton Talbot "
    "Thorne Tilden Trent Tucker Underhill Vance Vaughan Wakefield Walden Warwick Webster Wendell Weston Whitaker "
    "Wilcox Winslow Wyatt York"
).split()
PLACE_STARTS = (
    "Ber Bran Brim Cald Cor Dar Del Dun Eld Esk Fal Fen Gar Gil Hal Har Hol Jar Kel Kor Lam Lin Lor Mal Mar Mor Nar "
    "Nor Pel Quil Ral Rin Sal Sel Sten Tal Tar Thel Tol Val Var Wen Wil Yar Zel"
).split()
PLACE_MIDDLES = "a an ar e el en er i il in o on or u un".split()
PLACE_ENDS = (
    "bourne bridge burg by dale den field ford gate ham haven holm hurst land leigh mere mont moor ness port "
    "ridge stad stead ster ton vale vath vik wick worth"
).split()
MONTHS = "January February March April May June July August September October November December".split()
DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ATTEMPTS = 1000


class Names:
    """Draws names from one random source and gives none of them twice."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.given: set[str] = set()

    def person(self) -> str:
        """First and last name; with an initial between them once the plain ones run short."""
        choice = self.rng.choice
        return self._new(
            lambda: f"{choice(FIRST_NAMES)} {choice(LAST_NAMES)}",
            lambda: f"{choice(FIRST_NAMES)} {chr(self.rng.randrange(65, 91))}. {choice(LAST_NAMES)}",
        )

    def place(self) -> str:
        """A town's name of one word."""
        choice = self.rng.choice
        return self._new(
            lambda: choice(PLACE_STARTS) + choice(PLACE_ENDS),
            lambda: choice(PLACE_STARTS) + choice(PLACE_MIDDLES) + choice(PLACE_ENDS),
        )

    def number(self, low: int, high: int) -> str:
        """A number of [low, high], in digits."""
        return self._new(lambda: str(self.rng.randint(low, high)))

    def one_of(self, choices: Sequence[str]) -> str:
        return self._new(lambda: self.rng.choice(choices))

    def date(self) -> tuple[str, str]:
        """Day and month, as "14 March" and as "March 14"."""
        day, month = self._new(self._some_date).split()
        return f"{day} {month}", f"{month} {day}"

    def _some_date(self) -> str:
        month = self.rng.randrange(12)
        return f"{self.rng.randint(1, DAYS[month])} {MONTHS[month]}"

    def _new(self, *makers: Callable[[], str]) -> str:
        """A name not given before: from the first maker, or from the next where that one repeats itself."""
        for attempt in range(ATTEMPTS):
            name = makers[min(attempt, len(makers) - 1)]()
            if name not in self.given:
                self.given.add(name)
                return name
        raise TaskError("the vocabulary of invented names is used up: ask for a shorter document")
