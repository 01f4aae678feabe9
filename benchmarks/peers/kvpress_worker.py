"""Runs in kvpress's own environment: reads a job as JSON, answers its questions behind each press, writes JSON.

    python kvpress_worker.py JOB.json RESULT.json

The job names a model folder, documents with prompts (raw text behind the document), and (press, ratio) pairs. Answers
come from kvpress's own pipeline object, one question after another, as it does it.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import kvpress  # noqa: F401  (registers the pipeline and patches attention)
import torch
import transformers
from kvpress import KVzipPress, SnapKVPress
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, pipeline

PRESSES = {
    "kvzip": lambda ratio: KVzipPress(compression_ratio=1 - 1 / ratio),
    "kvzip+": lambda ratio: KVzipPress(compression_ratio=1 - 1 / ratio, kvzip_plus_normalization=True),
    "snapkv": lambda ratio: SnapKVPress(compression_ratio=1 - 1 / ratio),
}


@torch.no_grad()
def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    tokenizer.chat_template = None
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = job["eos_token_ids"]  # the same as in ttmem
    pipe = pipeline("kv-press-text-generation", model=model, tokenizer=tokenizer)
    written = WrittenTokens(tokenizer, job["eos_token_ids"])
    rows = [
        run(pipe, model, tokenizer, written, document, press, ratio)
        for document in job["documents"]
        for press, ratio in job["presses"]
    ]
    versions = {"kvpress": version("kvpress"), "transformers": transformers.__version__, "torch": torch.__version__}
    Path(sys.argv[2]).write_text(json.dumps({"versions": versions, "rows": rows, "peak_bytes": peak()}))


class WrittenTokens:
    """Sees the tokens that an answer is decoded from, and ends the answer where the first end token is.

    kvpress looks for end tokens from the second token on: where the model ends at once, it goes on behind the end.
    """

    def __init__(self, tokenizer: Any, ends: list[int]) -> None:
        self.decode, self.ends, self.count = tokenizer.decode, set(ends), 0
        tokenizer.decode = self

    def __call__(self, ids: Any, **options: Any) -> str:
        found = ids.tolist()
        self.count = len(found)
        end = next((place for place, id in enumerate(found) if id in self.ends), len(found))
        return str(self.decode(found[:end], **options))


def run(
    pipe: Any,
    model: Any,
    tokenizer: Any,
    written: WrittenTokens,
    document: dict[str, Any],
    press: str,
    ratio: float,
) -> dict[str, Any]:
    ids = tokenizer(document["text"], add_special_tokens=False, return_tensors="pt").input_ids
    cache = DynamicCache()
    start = time.perf_counter()
    compress = contextlib.nullcontext() if press == "none" else PRESSES[press](ratio)(model)
    with compress:
        model.model(input_ids=ids, past_key_values=cache)
    seconds = time.perf_counter() - start
    held = sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))
    answers, times = [], []
    for prompt, room in document["prompts"]:
        question = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        lengths = [cache.get_seq_length(i) for i in range(len(cache))]
        start = time.perf_counter()
        answer = pipe.generate_answer(question, cache, ids.shape[1], room)
        times.append((time.perf_counter() - start) / written.count)
        pipe._remove_answer_from_cache(cache, lengths)
        answers.append(answer)
    return {
        "document": document["name"],
        "press": press,
        "ratio": ratio,
        "answers": answers,
        "seconds": seconds,
        "bytes": held,
        "seconds_per_token": sorted(times)[len(times) // 2],
        "document_tokens": ids.shape[1],
    }


def peak() -> int:
    """Highest resident memory of this process, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def version(package: str) -> str:
    from importlib.metadata import version as of

    return of(package)


if __name__ == "__main__":
    main()
