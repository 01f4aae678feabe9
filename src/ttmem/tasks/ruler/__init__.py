"""The 13 tasks of RULER (Hsieh et al., 2024), generated offline at any length.

RULER's prompt, instruction + context + question + answer prefix, is cut behind the context: what comes before the cut
is the document, the rest the question's prompt, so that a document can be compacted before its question is known.
"""
