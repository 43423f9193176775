"""docs/performance_model.md is what the command says, and what is claimed there is so."""

import json
import subprocess
import sys

import pytest
from bench_tools import REPOSITORY

from benchmarks import validate


def command(*arguments):
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "benchmarks" / "validate.py"), *arguments], capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def runs():
    return json.loads(validate.PUBLISHED.read_text())["runs"]


def test_the_page_is_what_the_command_prints():
    status, printed, _ = command("--markdown")
    assert status == 0
    assert (REPOSITORY / "docs" / "performance_model.md").read_text() == printed


def test_all_forms_have_the_same_numbers():
    status, printed, _ = command("--json")
    found = json.loads(printed)
    assert (status, found["ok"], found["errors"]) == (0, True, [])
    assert len(found["constants_bytes_per_second"]) == 2
    text = command()[1]
    for row in found["rows"]:
        assert f"{row['predicted_update_seconds']:.1f}" in text
        assert f"{row['predicted_iteration_seconds']:.1f}" in text
        assert row["model"] == "52B" or f"{row['update_error']:+.1%}" in text
    for rate in found["constants_bytes_per_second"].values():
        assert f"{rate / 1e9:.3f} GB/s" in text


def test_a_prediction_by_hand(runs):
    rates = validate.fit(runs)
    assert rates["deepspeed"] == pytest.approx(28 * 44.28e9 / 209.33610)
    assert rates["mlp-offload"] == pytest.approx(24 * 44.28e9 / 89.40741)
    run = next(r for r in runs if (r["system"], r["model"]) == ("deepspeed", "100B"))
    row = validate.predict(run, rates)
    assert row.predicted_update_seconds == pytest.approx(105.89 / 44.28 * 209.33610)
    assert row.predicted_iteration_seconds == pytest.approx(32 / 28 * 105.89 / 44.28 * 209.33610 + 4 * 1.20237)


def test_only_the_52b_runs_and_the_forward_times_are_put_in(runs):
    """What is predicted must not be an input."""
    rates = validate.fit(runs)
    for run in runs:
        changed = {
            key: value if key != "forward_ms" and not key.endswith("_ms") else value * 7 for key, value in run.items()
        }
        changed["forward_ms"] = run["forward_ms"]
        others = [changed if other is run else other for other in runs]
        if run["model"] != "52B":
            assert validate.fit(others) == rates
        before, after = validate.predict(run, rates), validate.predict(changed, rates)
        assert before.predicted_update_seconds == after.predicted_update_seconds
        assert before.predicted_iteration_seconds == after.predicted_iteration_seconds


def test_a_claim_that_does_not_hold_is_told(runs):
    rates = validate.fit(runs)
    rows = [validate.predict(run, rates) for run in runs]
    claimed = {(row.system, row.model) for row in rows if row.claimed}
    assert {model for system, model in claimed if system == "deepspeed"} == {"40B", "52B", "70B", "100B", "120B"}
    assert {model.split(",")[0] for system, model in claimed if system == "mlp-offload"} == {"40B", "52B", "70B"}
    assert validate.broken_claims(rows) == []
    slower = [row._replace(iteration_seconds=row.iteration_seconds * 1.2) for row in rows if row.model == "70B"]
    assert [line.split(":")[0] for line in validate.broken_claims(slower)] == ["deepspeed 70B", "mlp-offload 70B"]
    large = [row for row in rows if not row.claimed]
    assert len(large) == 2 and all(row.update_error < -0.1 for row in large), "what is not claimed is off, and is shown"
