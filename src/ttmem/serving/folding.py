"""What the process of one folding does: the older turns of a conversation become a memory (`long_conversation.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ttmem.progress import Progress


def fold(job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Fold `job["messages"]` behind `job["document"]` (a file, or None), going on from the folder `job["previous"]`
    with its first `job["folded"]` messages, into the folder `job["folder"]`.

    Returns how many messages are folded now, and what of them is kept.
    """
    import torch

    from ttmem.long_conversation import Folding, LongConversation
    from ttmem.memory import Memory
    from ttmem.models import load_model

    torch.set_num_threads(job["threads"])
    with progress.stage("loading the model", 1):
        model = load_model(job["model"], dtype=job["dtype"], device=job["device"])
    messages = job["messages"]
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    settings: dict[str, Any] = {"folding": Folding(**job["folding"]), "progress": progress}
    if job["document"] is None:
        conversation = LongConversation.start(model, system, **settings)
    else:
        memory = Memory.load(job["document"]).to(model.device, model.dtype)
        conversation = LongConversation(model, memory, system=system, **settings)
    if job["previous"] is not None:
        conversation.restore(Path(job["previous"]), messages, job["folded"])
    conversation.messages = messages
    done = conversation.fold()
    if done is None:
        return {"folded_messages": conversation.folded}
    folder = Path(job["folder"])
    conversation.save(folder)
    conversation.memory.save(folder / "memory.ttmem", keep_document=False)
    return {
        "folded_messages": conversation.folded,
        "folded_tokens": sum(tokens for tokens, _ in done.parts),
        "parts": [{"tokens": tokens, "ratio": ratio} for tokens, ratio in done.parts],
        "memory_tokens": round(done.entries / conversation.memory.heads, 2),
    }
