"""MAD: six synthetic token tasks that tell sequence mixers apart (Poli et al., 2024, arXiv 2403.17844).

`settings`: which tasks at which difficulty, and the sweep. `instances`: how one sequence is made. `data`: the sets that
a model is trained and tested on, and their score.
"""

from ttmem.tasks.mad.data import MadData, class_accuracy, make_data
from ttmem.tasks.mad.settings import FULL, REDUCED, TASKS, MadSetting, Sweep, baseline, grid, reduced, reduced_sweep

__all__ = [
    "FULL",
    "REDUCED",
    "TASKS",
    "MadData",
    "MadSetting",
    "Sweep",
    "baseline",
    "class_accuracy",
    "grid",
    "make_data",
    "reduced",
    "reduced_sweep",
]
