"""Streams of text: the pieces are the whole, cut before a stop string."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from ttmem.serving.text import TextStream


def pieces(tokenizer: PreTrainedTokenizerFast, ids: list[int], stops: tuple[str, ...] = ()) -> list[str]:
    stream, found = TextStream(tokenizer, stops), []
    for token in ids:
        found.append(stream.add(token))
        if stream.stopped:
            break
    return [*found, stream.finish()]


@given(text=st.text(max_size=30))
def test_pieces_are_the_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@given(ids=st.lists(st.integers(0, 273), max_size=25))
def test_pieces_are_what_any_tokens_decode_to(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> None:
    """Bytes that make no character included: what cannot be finished comes at the end."""
    found = "".join(pieces(tokenizer, ids))
    assert found.rstrip("�") == tokenizer.decode(ids, skip_special_tokens=True).rstrip("�") or "�" in found


@given(text=st.text("ab\n", max_size=20), stops=st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=3))
def test_a_stop_string_cuts_at_its_first_place(
    tokenizer: PreTrainedTokenizerFast, text: str, stops: list[str]
) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    places = [text.find(stop) for stop in stops if stop in text]
    found = pieces(tokenizer, ids, tuple(stops))
    whole = "".join(found)
    assert text.startswith(whole)
    if not places:
        assert whole == text
    else:  # a longer stop string may begin earlier and be seen later: what has been said stays said
        assert len(whole) <= max(place for place in places)
        assert not any(stop in whole for stop in stops)


def test_characters_come_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("naïve 東京", add_special_tokens=False).input_ids
    assert all("�" not in piece for piece in pieces(tokenizer, ids))
    assert pieces(tokenizer, ids[:-1])[-1] == "�"  # cut within a character, which decoding shows as one


def test_a_beginning_of_a_stop_string_is_held_back(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("xabay", add_special_tokens=False).input_ids
    assert pieces(tokenizer, ids, ("abc",)) == ["x", "", "", "aba"[:2], "ay", ""]
