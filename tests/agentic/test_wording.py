import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from agentic.wording import spell_setting

FOLDERS = [
    *("runs/s0", "my runs/a b", "x/lr=0.1,seed=1", "20261201_000612", "1e5", "null", "[x]"),
    *("it's", 'a"b', "a\\", "a\\\\'b", "a(b)", "~/x", " a ", "läufe", "$x", "a;b"),
]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_setting_comes_back_from_a_shell_and_hydra(folder):
    (word,) = shlex.split(spell_setting("resume", folder))
    override = OverridesParser.create().parse_override(word)
    value = override.value()
    assert not override.is_sweep_override()
    assert getattr(value, "text", value) == folder


def test_a_plain_name_is_left_as_it_is():
    assert spell_setting("resume", "runs/20261201-000612-walker_walk") == (
        "resume=runs/20261201-000612-walker_walk"
    )
