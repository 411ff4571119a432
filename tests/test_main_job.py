"""The README's main job, whole: about ten minutes on two cores."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_last_trial_is_near_the_best_of_the_data(tmp_path, seed):
    subprocess.run(
        [sys.executable, "-m", "agentic.train", f"seed={seed}", "run_dir=run"],
        cwd=tmp_path,
        check=True,
    )
    (entry,) = json.loads((tmp_path / "run" / "results.json").read_text())["results"]
    assert entry["contexts"] >= 8
    assert entry["trials"] == 4
    assert entry["kept"]["last"]["mean"] >= 0.8 * entry["dataset"]["max"]
    assert entry["kept"]["last"]["mean"] >= 5 * entry["random"]["mean"]
