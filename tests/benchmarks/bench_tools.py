"""Running the benchmarks as a user does."""

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

NO_CAPS_HERE = "capped paths need"
"""How the message begins where loop devices or throttling cannot be had (not root, containers)."""


def run_benchmark(name, *arguments, json_file):
    """(exit status, what it says, contents of its JSON file or None)."""
    command = [sys.executable, str(REPOSITORY / "benchmarks" / f"{name}.py"), *map(str, arguments)]
    done = subprocess.run(
        [*command, "--json", str(json_file)], capture_output=True, text=True, timeout=240, cwd=json_file.parent
    )
    said = done.stdout + done.stderr
    return done.returncode, said, json.loads(json_file.read_text()) if json_file.exists() else None


def deepspeed_is_here():
    return (REPOSITORY / ".work" / "deepspeed" / "ready").exists()


def other_errors(result):
    """All but those about efficiency: tiny steps may outrun their caps, and then the benchmark has to say so."""
    return [error for error in result["errors"] if "above 1.00 the measurement is wrong" not in error]
