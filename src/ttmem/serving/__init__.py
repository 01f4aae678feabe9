"""The server: OpenAI's API over memories, with background compaction. `pip install 'ttmem[serve]'`."""
