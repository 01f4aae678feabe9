"""Texts to a token file that the training scripts read.

    python benchmarks/tokenize_text.py SOURCE... --out tokens.npy [--model NAME] [--field text] [--limit 1000000000]

A source is a text or Markdown file, a JSON Lines file, a folder of these, or a dataset of the hub (OWNER/NAME:SPLIT).
The end-of-sequence token of the model's tokenizer stands behind every document; it is printed, for `--separator`.
"""

from __future__ import annotations

import argparse
import json
from itertools import chain
from pathlib import Path

import ttmem
from ttmem.training.text import read_texts, write_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", metavar="SOURCE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", help="whose tokenizer; the bundled model's by default")
    parser.add_argument("--field", default="text", help="of JSON lines and datasets")
    parser.add_argument("--limit", type=int, help="tokens at most")
    arguments = parser.parse_args()
    model = ttmem.load_model(arguments.model)
    separator = model.tokenizer.eos_token_id
    if separator is None:
        parser.error(f"{model.name}'s tokenizer has no end-of-sequence token to stand between documents")
    texts = chain.from_iterable(read_texts(source, arguments.field) for source in arguments.sources)
    count = write_tokens(texts, model.encode, separator, arguments.out, arguments.limit)
    print(json.dumps({"tokens": count, "separator": separator, "vocabulary": len(model.tokenizer)}))


if __name__ == "__main__":
    main()
