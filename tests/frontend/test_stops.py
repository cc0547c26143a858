"""Stop strings: earliest start wins, whatever the pieces; nothing of a match is ever released (C-34)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcp_mono.frontend.stops import StopFinder


def fed(stops: tuple[str, ...], pieces: list[str]) -> tuple[list[str], int | None]:
    finder = StopFinder(stops)
    return [*map(finder.push, pieces), finder.finish()], finder.match_end


@pytest.mark.parametrize(
    ("stops", "released", "match_end"),
    [
        (("bc",), ["a", "", "", "", ""], 3),
        (("cd", "bc"), ["a", "", "", "", ""], 3),
        (("d",), ["a", "b", "c", "", ""], 4),
        (("abcd",), ["", "", "", "", ""], 4),
        (("xyz",), ["a", "b", "c", "d", ""], None),
        (("cx",), ["a", "b", "", "cd", ""], None),
        (("de",), ["a", "b", "c", "", "d"], None),
        # "c" is complete first, but "bcd" starts earlier and still can be completed: it is waited for.
        (("c", "bcd"), ["a", "", "", "", ""], 4),
        (("c", "bcx"), ["a", "", "", "b", ""], 3),
        (("bc", "bcd"), ["a", "", "", "", ""], 3),
        ((), ["a", "b", "c", "d", ""], None),
    ],
)
def test_one_character_at_a_time(stops: tuple[str, ...], released: list[str], match_end: int | None) -> None:
    assert fed(stops, list("abcd")) == (released, match_end)


def test_waiting_match_that_is_never_completed_gives_way_at_the_end() -> None:
    assert fed(("c", "bcde"), list("abcd")) == (["a", "", "", "", "b"], 3)


letters = st.text("ab", max_size=12)


@given(st.lists(letters, max_size=6), st.lists(st.text("ab", min_size=1, max_size=4), max_size=4))
def test_result_depends_on_the_text_alone(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    starts = [(text.find(stop), len(stop)) for stop in stops if stop in text]
    expected = (text, None) if not starts else (text[: min(starts)[0]], sum(min(starts)))
    released, match_end = fed(tuple(stops), pieces)
    assert ("".join(released), match_end) == expected


@given(st.lists(letters, max_size=6), st.lists(st.text("ab", min_size=1, max_size=4), max_size=4))
def test_text_is_held_only_while_it_could_become_a_stop(pieces: list[str], stops: list[str]) -> None:
    finder = StopFinder(tuple(stops))
    text = ""
    for piece in pieces:
        text += piece
        finder.push(piece)
        held = text[finder.released :]
        if finder.match_end is None and held:
            assert any(stop.startswith(held[: len(stop)]) for stop in stops)
