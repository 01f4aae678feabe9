#!/bin/sh
# Makes an environment of its own for kvpress, which needs an older transformers than ttmem.
#   sh benchmarks/peers/install_kvpress.sh [FOLDER=.venv-kvpress]
set -e
folder="${1:-.venv-kvpress}"
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --disable-pip-version-check torch==2.13.0 transformers==5.2.0 kvpress==0.5.5
echo "kvpress is in $folder; next: python benchmarks/peer_kvpress.py --environment $folder"
