import pytest

from agentic.selection import Selection, parse_all


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("rnd", list(range(10))),
        ("rnd:first_3000", [0, 1, 2]),
        ("rnd:first_2k", [0, 1]),
        ("rnd:first_1M", list(range(10))),
        ("rnd:first_0.002M", [0, 1]),
        ("rnd:first_1", [0]),
        ("rnd:first_30%", [0, 1, 2]),
        ("rnd:even_20%", [2, 7]),
        ("rnd:even_3k", [1, 5, 8]),
        ("rnd:even_100%", list(range(10))),
    ],
)
def test_takes_whole_episodes(text, taken):
    assert Selection.parse(text).take(range(10), 1000) == taken


def test_exorls_first_million():
    selection = Selection.parse("icm_apt:first_1M")
    assert selection.algorithm == "icm_apt"
    assert selection.take(range(10_000), 1000) == list(range(1000))
    assert selection.take(range(40_000), 250) == list(range(4000))


@pytest.mark.parametrize(
    "text",
    ["", "rnd:", "rnd:first", "rnd:last_3", "rnd:even_0", "rnd:even_101%", "a/b", "rnd:first_-1"],
)
def test_what_is_no_selection_is_named(text):
    with pytest.raises(ValueError, match=f"algorithms: got '{text}', expected"):
        Selection.parse(text)


@pytest.mark.parametrize("texts", [[], ["rnd", "rnd:even_1k"]])
def test_a_mixture_names_every_algorithm_once(texts):
    with pytest.raises(ValueError, match="algorithms: got .*expected each of them once"):
        parse_all(texts)
