"""Text of ids that come one by one: whole characters, up to a string that ends it."""

from __future__ import annotations

import itertools
import random
from typing import ClassVar

import pytest

from dsv4_jax.errors import RequestError
from dsv4_jax.text import StopText, TextStream


class Bytes:
    """A tokenizer of a token a byte, and of words that drop the space where a text begins."""

    words: ClassVar[dict[int, bytes]] = {256: b" wor", 257: b"ld", 258: b""}

    def decode(self, ids: list[int]) -> str:
        text = b"".join(self.words.get(token, bytes([token % 256])) for token in ids).decode(errors="replace")
        return text.removeprefix(" ")


@pytest.mark.parametrize(
    "ids",
    [
        [*"déjà \U0001f4a5 vu".encode()],
        [258, 256, 257, 258, 256, 257, 0xC3, 0xA9],
        [0xF0, 0x9F, 65, 0x9F, 0xC3],
        [256, 0xFF, 0xFF, 256, *"\ufffd".encode(), 256, 258, 0xE2, 0x82],
    ],
    ids=["characters", "words", "broken", "replacement"],
)
def test_pieces_add_up_to_the_text(ids):
    stream, tokenizer = TextStream(Bytes()), Bytes()
    pieces = [stream.add(token) for token in ids]
    assert "".join(pieces) + stream.end() == tokenizer.decode(ids)
    assert not any(piece.endswith("\ufffd") for piece in pieces), "a character is shown when it is complete"
    if ids[0] == ord("d"):
        assert pieces == ["d", "", "é", "j", "", "à", " ", "", "", "", "\U0001f4a5", " ", "v", "u"]


def test_stop_strings_are_found_across_pieces():
    def run(pieces, *stops):
        stop = StopText(stops)
        shown = []
        for piece in pieces:
            shown.append(stop.add(piece))
            if stop.found:
                return shown, True
        return [*shown, stop.end()], False

    assert run(["ab", "c", "d"], "bc") == (["a", ""], True)
    assert run(["ab", "b", "c"], "bc") == (["a", "b", ""], True)
    assert run(["ab", "x"], "bc", "xyz") == (["a", "b", "x"], False)
    assert run(["one two"], "two", "one") == ([""], True)
    assert run(["anything"]) == (["anything", ""], False)


def test_the_stop_string_that_ends_first_wins_however_text_is_cut():
    """Of several that end at the same place the longest, by definition: against all places of all texts."""
    rng, compared = random.Random(0), 0
    cases = [("aaaabaaabbbb", ["ba", "abaa"]), ("baa", ["baa", "a"]), ("xabc", ["bc", "abc", "c"])]
    for _ in range(300):
        text = "".join(rng.choices("ab", k=rng.randrange(1, 12)))
        cases.append((text, ["".join(rng.choices("ab", k=rng.randrange(1, 5))) for _ in range(3)]))
    for text, stops in cases:
        ends = range(1, len(text) + 1)
        found = next((start for end in ends for start in range(end) if text[start:end] in stops), None)
        for _ in range(5):
            cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(5)))
            stop, shown = StopText(stops), ""
            for start, end in itertools.pairwise([0, *cuts, len(text)]):
                shown += "" if stop.found else stop.add(text[start:end])
            shown += "" if stop.found else stop.end()
            assert (shown, stop.found) == (text[:found], found is not None), (text, stops, cuts)
            compared += 1
    assert compared == 5 * 303


def test_the_text_of_a_stream_ends_before_a_stop_string():
    """Whole characters only, and nothing of what may be the string's beginning before it is known not to be."""
    ids = [*"d\u00e9j\u00e0 vu: once".encode()]

    def shown(*stops):
        stream = TextStream(Bytes(), stops)
        pieces = [stream.add(token) for token in ids]
        return "".join(pieces) + stream.end(), stream.stopped, pieces

    assert shown("\u00e0 v")[:2] == ("d\u00e9j", True)
    assert shown("once more")[:2] == ("d\u00e9j\u00e0 vu: once", False)
    pieces = shown("vux", " vu:")[2]
    assert pieces == ["d", "", "\u00e9", "j", "", "\u00e0", "", "", "", "", "", "", "", "", ""]
    for stops in ([""], ["a", 7]):
        with pytest.raises(RequestError, match="a string that ends a text must have a character"):
            TextStream(Bytes(), stops)


def test_bytes_that_are_no_text_cost_no_more_each():
    """All of them are replaced, the characters between them are whole, and no id is decoded over and over."""

    class Counted(Bytes):
        asked = 0

        def decode(self, ids: list[int]) -> str:
            self.asked += len(ids)
            return super().decode(ids)

    rng, tokenizer = random.Random(0), Counted()
    parts = [[0xFF], [0x80], [0xF0, 0x9F], [0xC3], [*"\u00e9".encode()], [*"\U0001f4a5".encode()], [65]]
    ids = [byte for _ in range(2000) for byte in rng.choices(parts, [8, 4, 2, 2, 1, 1, 1])[0]]
    stream = TextStream(tokenizer)
    assert "".join(map(stream.add, [0xFF] * 1000 + ids)) + stream.end() == Bytes().decode([0xFF] * 1000 + ids)
    assert tokenizer.asked < 100 * (1000 + len(ids))
