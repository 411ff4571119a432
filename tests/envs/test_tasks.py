import dataclasses

import pytest

from envs import TASKS, DmcEnv, domain_tasks, expand


def test_table_lists_the_papers_nine_tasks_and_then_exorls_others():
    assert list(TASKS) == [
        "walker_stand",
        "walker_walk",
        "walker_run",
        "cheetah_run",
        "cartpole_swingup",
        "jaco_reach_top_left",
        "jaco_reach_top_right",
        "jaco_reach_bottom_left",
        "jaco_reach_bottom_right",
        "walker_flip",
        "cheetah_run_backward",
        "cheetah_flip",
        "cheetah_flip_backward",
        "cartpole_balance",
        "cartpole_balance_sparse",
        "cartpole_swingup_sparse",
    ]
    assert all(name == spec.name for name, spec in TASKS.items())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("walker_walk", ("walker", 1000, 24, 6, 18, 0.025, 1000.0)),
        ("cheetah_run", ("cheetah", 1000, 17, 6, 18, 0.01, 1000.0)),
        ("cartpole_swingup", ("cartpole", 1000, 5, 1, 4, 0.01, 1000.0)),
        ("jaco_reach_top_left", ("jaco", 250, 42, 9, 18, 0.04, 250.0)),
    ],
)
def test_sizes_are_those_of_the_files(name, expected):
    spec = TASKS[name]
    assert expected == (
        spec.domain,
        spec.episode_steps,
        spec.observation_size,
        spec.action_size,
        spec.physics_size,
        spec.control_seconds,
        spec.max_return,
    )


def test_specs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TASKS["walker_run"].episode_steps = 5


def test_expand():
    assert expand("walker_run") == (TASKS["walker_run"],)
    assert [spec.name for spec in expand("jaco_reach")] == [n for n in TASKS if "jaco" in n]
    for domain in ("walker", "cheetah"):
        assert expand(f"{domain}_all") == domain_tasks(domain)


@pytest.mark.parametrize("name", ["walker", "jaco", "jaco_reach_top", "", "Walker_Walk"])
def test_expand_names_what_it_got_and_expected_in_one_line(name):
    with pytest.raises(ValueError, match=r"^task: got .*, expected one of walker_stand") as error:
        expand(name)
    assert repr(name) in str(error.value)
    assert "jaco_reach" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("refuse", [expand, DmcEnv])
@pytest.mark.parametrize(
    "name",
    [
        "quadruped_walk",
        "quadruped_roll_fast",
        "hopper_flip",
        "point_mass_maze_reach_top_left",
        "walker_multitask",
        "jaco_reach_multitask",
    ],
)
def test_exorls_tasks_that_are_not_here_are_refused_by_name(name, refuse):
    message = (
        rf"^task: got '{name}' \(a task of ExoRL that is not supported here\), expected one of w"
    )
    with pytest.raises(ValueError, match=message) as error:
        refuse(name)
    assert "\n" not in str(error.value)


def test_domain_tasks():
    assert [spec.name for spec in domain_tasks("walker")] == [
        "walker_stand",
        "walker_walk",
        "walker_run",
        "walker_flip",
    ]
    assert len(domain_tasks("jaco")) == 4
    with pytest.raises(ValueError, match=r"domain: got 'quadruped', expected one of walker"):
        domain_tasks("quadruped")
