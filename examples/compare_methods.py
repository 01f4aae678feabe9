"""Latent Compaction and KVzip+ on one document, at the same budget, sharing what the teacher gives.

python examples/compare_methods.py
"""

import ttmem
from ttmem.compaction.document import Document
from ttmem.compaction.kvzip_plus import KVzipPlus
from ttmem.compaction.latent import LatentCompaction
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.settings import PRESETS, Budget
from ttmem.demo import document
from ttmem.evaluation.fidelity import measure_fidelities

model = ttmem.load_model()
settings = PRESETS["quick"]
progress = ttmem.ConsoleProgress()
prepared = Prepared(model, Document.of(model, document()), settings, progress)
budget = Budget.of(prepared.document.length, ratio=16)
memories = {method.name: method(prepared, budget) for method in (LatentCompaction(settings), KVzipPlus())}
for name, fidelity in measure_fidelities(model, prepared.full, memories, progress).items():
    print(f"{name:8} KL {fidelity.kl:.3f}  same next token {100 * fidelity.top1:.1f} %")
