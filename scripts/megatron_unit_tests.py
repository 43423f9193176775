"""Run Megatron's own tests twice, with its distributed optimizer and with the offloaded one, and compare."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
REMOTE = "https://github.com/NVIDIA/Megatron-LM.git"
TEST_FILE = "tests/unit_tests/dist_checkpointing/test_optimizer.py"
NEEDED = ("tests/__init__.py", "tests/unit_tests")
SILENT_SECONDS = 900.0  # for one test, or to start
ALONE_SECONDS = 60.0  # that a rank whose test failed waits for the others, which may be waiting for it
EPILOG = """\
Every test that passes with Megatron's optimizer must pass with the offloaded one; else the exit status is 1. The tests
come from --source at --tag and lie in a temporary directory, as does everything that they write; Megatron-Core is the
installed one. Without GPUs, the CPU and gloo take their place.

examples:
  bash scripts/megatron_unit_tests.sh
  bash scripts/megatron_unit_tests.sh --source ~/Megatron-LM --tag core_v0.19.0 -k bucket_space
"""


@dataclass
class Outcome:
    """One test on all ranks: failed if it failed on any."""

    outcome: str
    reason: str = ""
    report: str = ""
    offloaded: bool = False


def main() -> int:
    version = importlib.metadata.version("megatron-core")
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", default=REMOTE, help="Megatron-LM: a repository to clone (default: %(default)s)")
    parser.add_argument("--tag", default=f"core_v{version}", help="tag or branch of the tests (default: %(default)s)")
    parser.add_argument("--file", default=TEST_FILE, help="test file (default: %(default)s)")
    parser.add_argument("-k", dest="expression", default="", help="only these tests, as in pytest")
    parser.add_argument("--processes", type=int, default=8, help="ranks (default: %(default)s)")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--keep", action="store_true", help="keep the temporary directory, with the ranks' output")
    options = parser.parse_args()

    with _temporary(options.keep) as directory:
        tests = directory / "tree"
        _fetch(options.source, options.tag, directory / "megatron-lm", tests)
        results = {}
        for name in ("stock", "offloaded"):
            results[name] = Run(name, directory / name, tests, options).results()
        print(table(results))
        if options.markdown:
            options.markdown.write_text(markdown(results, options.tag))
    worse = [test for test, stock in results["stock"].items() if _worse(stock, results["offloaded"].get(test))]
    for test in worse:
        offloaded = results["offloaded"].get(test)
        print(f"\n{test}\n{offloaded.report or offloaded.reason if offloaded else 'not run'}")
    passed = sum(outcome.outcome == "passed" for outcome in results["stock"].values())
    print(f"{passed} tests pass with stock; of them {len(worse)} do not with the offloaded optimizer")
    if not passed:
        print("megatron_unit_tests: nothing passed, so nothing was compared", file=sys.stderr)
    return 1 if worse or not passed else 0


def _worse(stock: Outcome, offloaded: "Outcome | None") -> bool:
    return stock.outcome == "passed" and (offloaded is None or offloaded.outcome != "passed")


# ------------------------------------------------------------------------------------------ running


@contextlib.contextmanager
def _temporary(keep: bool) -> "Iterator[Path]":
    # /var/tmp, not /tmp: state on tmpfs would not be on storage
    directory = Path(tempfile.mkdtemp(prefix="megatron-unit-tests-", dir="/var/tmp"))
    try:
        yield directory
    finally:
        if keep:
            print(f"kept: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


def _fetch(source: str, tag: str, clone: Path, target: Path) -> None:
    """Only the tests: the rest of the source tree would hide the installed Megatron-Core."""
    repository = Path(source).expanduser()
    if not repository.is_dir():
        print(f"fetching {tag} of {source}", flush=True)
        command = ["git", "clone", "--quiet", "--depth=1", f"--branch={tag}", source, str(clone)]
        if subprocess.run(command).returncode:
            sys.exit(
                f"megatron_unit_tests: cannot fetch {tag} of {source}; give --source and --tag of one that is there"
            )
        repository, tag = clone, "HEAD"
    target.mkdir()
    archive = ["git", "-C", str(repository), "archive", tag, *NEEDED]
    with subprocess.Popen(archive, stdout=subprocess.PIPE) as process:
        unpacked = subprocess.run(["tar", "x", "-C", str(target)], stdin=process.stdout).returncode
    if process.returncode or unpacked:
        sys.exit(f"megatron_unit_tests: {repository} has no tag or branch {tag} with {' and '.join(NEEDED)}")
    (target / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")
    shutil.rmtree(clone, ignore_errors=True)


class Run:
    """All tests with one optimizer. Processes that fell out of step are started again for the tests that are left."""

    def __init__(self, name: str, directory: Path, tests: Path, options: argparse.Namespace):
        self._name, self._directory, self._tests, self._options = name, directory, tests, options
        self._done: "dict[str, Outcome]" = {}
        self._all: "list[str]" = []
        directory.mkdir()

    def results(self) -> "dict[str, Outcome]":
        """Outcomes by test, in the order of the file."""
        start = 0
        while not self._all or len(self._done) < len(self._all):
            start += 1
            before = len(self._done)
            self._start(self._directory / f"start{start}")
            if len(self._done) == before:  # the processes ended, or were silent, in the next test
                left = [test for test in self._all if test not in self._done]
                if not left:
                    sys.exit(f"megatron_unit_tests: no test could be collected:\n{self._tail(start)}")
                self._record(left[0], Outcome("failed", "the processes ended or hung", self._tail(start)))
        return {test: self._done[test] for test in self._all}

    def _start(self, directory: Path) -> None:
        from mlp_offload.megatron import cpu_device

        results = directory / "results"
        results.mkdir(parents=True)
        (directory / "done.json").write_text(json.dumps(list(self._done)))
        environment = dict(os.environ, OMP_NUM_THREADS="1", CUDA_DEVICE_MAX_CONNECTIONS="1", PYTHONWARNINGS="ignore")
        environment |= {"UNIT_TESTS_RESULTS": str(results), "UNIT_TESTS_DONE": str(directory / "done.json")}
        if self._name == "offloaded":
            paths = [directory / "path0", directory / "path1"]
            for path in paths:
                path.mkdir()
            environment["UNIT_TESTS_PATHS"] = os.pathsep.join(map(str, paths))
        sources = [str(self._tests), str(SCRIPTS), str(SCRIPTS.parent), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sources))
        if cpu_device.needed():
            cpu_device.activate_in_children(environment)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += [f"--nproc-per-node={self._options.processes}", "-m", "pytest", "-p", "megatron_unit_tests_plugin"]
        arguments = [
            "-q",
            "-s",
            self._options.file,
            *(["-k", self._options.expression] if self._options.expression else []),
        ]
        with (directory / "output").open("w") as output:
            process = subprocess.Popen(
                [*launch, *arguments],
                cwd=self._tests,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                self._watch(process, results)
            finally:
                _end(process)
        for path in directory.glob("path*"):
            shutil.rmtree(path)

    def _watch(self, process: subprocess.Popen, results: Path) -> None:
        """Record what the ranks do until they end, or wait in vain for each other."""
        deadline = time.monotonic() + SILENT_SECONDS
        waiting: "set[Path]" = set()
        ended = False
        while not ended:
            ended = process.poll() is not None or time.monotonic() > deadline
            if not self._all and (results / "tests.json").exists():
                self._all = json.loads((results / "tests.json").read_text())
            if self._collect(results, partial=ended):
                deadline = time.monotonic() + SILENT_SECONDS
            for file in results.glob("*/*.json"):
                record = json.loads(file.read_text())
                if record["test"] not in self._done and record["outcome"] == "failed" and file not in waiting:
                    waiting.add(file)
                    deadline = min(deadline, time.monotonic() + ALONE_SECONDS)
            time.sleep(0.2)

    def _collect(self, results: Path, partial: bool) -> bool:
        """Record tests that all ranks finished; at the end also one that some did."""
        found = False
        for directory in sorted(results.glob("*/"), key=lambda d: d.stat().st_mtime):
            ranks = [json.loads(file.read_text()) for file in directory.glob("*.json")]
            if not ranks or ranks[0]["test"] in self._done:
                continue
            if len(ranks) < self._options.processes and not partial:
                continue
            worst = next((rank for rank in ranks if rank["outcome"] == "failed"), ranks[0])
            outcome = worst["outcome"] if len(ranks) == self._options.processes else "failed"
            offloaded = any(rank["offloaded"] for rank in ranks)
            self._record(worst["test"], Outcome(outcome, worst["reason"], worst["report"], offloaded))
            found = True
        return found

    def _record(self, test: str, outcome: Outcome) -> None:
        self._done[test] = outcome
        first_line = outcome.reason.partition("\n")[0][:100]
        print(
            f"{self._name} {len(self._done)}/{len(self._all)} {outcome.outcome:7} {_short(test)}"
            + (f"  {first_line}" if first_line else ""),
            flush=True,
        )

    def _tail(self, start: int) -> str:
        return (self._directory / f"start{start}" / "output").read_text(errors="replace")[-6000:]


def _end(process: subprocess.Popen) -> None:
    """End torchrun and its ranks, which are in sessions of their own."""
    import psutil

    if process.poll() is None:
        for member in [*psutil.Process(process.pid).children(recursive=True), process]:
            with contextlib.suppress(psutil.Error):
                member.kill()
    process.wait()


# ------------------------------------------------------------------------------------------ telling


def _short(test: str) -> str:
    return test.partition("::")[2]


def table(results: "dict[str, dict[str, Outcome]]") -> str:
    """One line a test."""
    lines = [f"{'stock':8} {'offloaded':10} {'ours built':10} test"]
    for test, stock in results["stock"].items():
        offloaded = results["offloaded"].get(test, Outcome("not run"))
        built = "yes" if offloaded.offloaded else "no"
        lines.append(f"{stock.outcome:8} {offloaded.outcome:10} {built:10} {_short(test)}")
    return "\n".join(lines)


def markdown(results: "dict[str, dict[str, Outcome]]", tag: str) -> str:
    """One row a test function; its parameters are counted."""
    rows: "dict[str, list[tuple[Outcome, Outcome]]]" = {}
    for test, stock in results["stock"].items():
        function = _short(test).partition("[")[0].replace("::", ".")
        rows.setdefault(function, []).append((stock, results["offloaded"].get(test, Outcome("not run"))))
    lines = [
        f"Tests of `{tag}`, Megatron-Core {importlib.metadata.version('megatron-core')}, "
        f"torch {importlib.metadata.version('torch')}, Python {platform.python_version()}",
        "",
        "| test | stock | offloaded | built an offloaded optimizer | why not passed with stock |",
        "|---|---|---|---|---|",
    ]
    for function, pairs in rows.items():
        reasons = sorted({s.reason.partition("\n")[0][:120] for s, _ in pairs if s.outcome != "passed"})
        built = sum(offloaded.offloaded for _, offloaded in pairs)
        counts = [_count([pair[which] for pair in pairs]) for which in (0, 1)]
        lines.append(f"| {function} | {counts[0]} | {counts[1]} | {built} of {len(pairs)} | {'; '.join(reasons)} |")
    return "\n".join(lines) + "\n"


def _count(outcomes: "list[Outcome]") -> str:
    counts: "dict[str, int]" = {}
    for outcome in outcomes:
        counts[outcome.outcome] = counts.get(outcome.outcome, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


if __name__ == "__main__":
    # Ended from outside, leave as after Ctrl-C: ranks and files are taken away on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    raise SystemExit(main())
