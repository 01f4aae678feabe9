"""Texts to a token file that the training scripts read.

    python benchmarks/tokenize_text.py SOURCE... --out tokens.npy [--model NAME] [--field text] [--limit 1000000000]
    python benchmarks/tokenize_text.py book.txt --out book.npy --bytes

A source is a text or Markdown file, a JSON Lines file, a folder of these, or a dataset of the hub (OWNER/NAME:SPLIT).
The end-of-sequence token of the model's tokenizer stands behind every document; it is printed, for `--separator`.
`--bytes` is for models whose tokens are bytes, such as the recipe `cpu` of `train_fast_weights.py`: the texts as they
are, in UTF-8, with a byte 0 between two documents.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from itertools import chain
from pathlib import Path

from common import at_least, run_script

from ttmem.models.loading import load_tokenizer
from ttmem.models.model import encode
from ttmem.training.text import BYTE_SEPARATOR, read_texts, write_bytes, write_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", metavar="SOURCE")
    parser.add_argument("--out", type=Path, required=True)
    tokens = parser.add_mutually_exclusive_group()
    tokens.add_argument("--model", help="whose tokenizer; the bundled model's by default")
    tokens.add_argument("--bytes", action="store_true", help="no tokenizer: a token is a byte")
    parser.add_argument("--field", default="text", help="of JSON lines and datasets")
    parser.add_argument("--limit", type=at_least(1), help="tokens at most")
    arguments = parser.parse_args()
    texts = chain.from_iterable(read_texts(source, arguments.field) for source in arguments.sources)
    if arguments.bytes:
        count, separator, vocabulary = write_bytes(texts, arguments.out, arguments.limit), BYTE_SEPARATOR, 256
    else:
        tokenizer = load_tokenizer(arguments.model)
        separator, vocabulary = tokenizer.eos_token_id, len(tokenizer)
        if separator is None:
            name = arguments.model or "the bundled model"
            parser.error(f"{name}'s tokenizer has no end-of-sequence token to stand between documents")
        count = write_tokens(texts, partial(encode, tokenizer), separator, arguments.out, arguments.limit)
    print(json.dumps({"tokens": count, "separator": separator, "vocabulary": vocabulary}))


if __name__ == "__main__":
    run_script(main)
