"""A real SLURM of two nodes, n1 and n2, on this host: slurmctld, two slurmd and a munged of its own, in one directory.

It uses nothing of the system's SLURM and leaves nothing behind. Programs come from Debian's packages, which are
installed where they are missing and we are root.
"""

from __future__ import annotations

import functools
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil
import pytest

PACKAGES = ("slurm-wlm", "munge")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue", "scancel")
START_SECONDS, END_SECONDS, INSTALL_SECONDS = 60, 20, 150
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL"}
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

# cred_expire: a requeued job waits until its credential has expired, two minutes by default.
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={place}/munge.socket,cred_expire=5
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd-%n.log
PluginDir={plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
ReturnToService=2
JobRequeue=1
KillWait=5
MinJobAge=300
SlurmdTimeout=120
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def program(name: str) -> "str | None":
    """Its path, also in sbin."""
    return shutil.which(name, path=_PATH)


@functools.cache
def install() -> None:
    """Find SLURM, or install it; skips the test where that cannot be done, and says why."""
    if all(map(program, PROGRAMS)):
        return
    wanted = f"apt-get install {' '.join(PACKAGES)}"
    if os.geteuid() != 0 or program("apt-get") is None:
        pytest.skip(f"no SLURM here, and only root on Debian can install it ({wanted})")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    with tempfile.TemporaryDirectory() as place:
        # Packages would start daemons where an init system runs; ours come from `Cluster`.
        policy = Path("/usr/sbin/policy-rc.d")
        made = not policy.exists()
        if made:
            policy.write_text("#!/bin/sh\nexit 101\n")
            policy.chmod(0o755)
        try:
            told = ""
            for update in (False, True):
                commands = [["apt-get", "update", "-q"]] if update else []
                commands += [["apt-get", "install", "-y", "-q", "--no-install-recommends", *PACKAGES]]
                for command in commands:
                    try:
                        done = subprocess.run(
                            command, capture_output=True, text=True, timeout=INSTALL_SECONDS, env=environment, cwd=place
                        )
                        told = done.stderr.strip()[-300:]
                    except subprocess.TimeoutExpired:
                        told = f"not done after {INSTALL_SECONDS} s"
                if all(map(program, PROGRAMS)):
                    return
        finally:
            if made:
                policy.unlink()
    pytest.skip(f"no SLURM here, and {wanted} failed: {told}")


class Cluster:
    """Started by ``with``, ended however it is left.

    Attributes:
        environment: for commands that talk to it.
    """

    def __init__(self) -> None:
        # Sockets have short names, so not below pytest's directories.
        self._place = Path(tempfile.mkdtemp(prefix="mlpo-slurm-", dir="/tmp"))
        self._configuration = self._place / "slurm.conf"
        self.environment = os.environ | {"SLURM_CONF": str(self._configuration), "PATH": _PATH}
        for name in [name for name in self.environment if name.startswith(("SLURM_JOB", "SLURM_STEP", "SBATCH_"))]:
            del self.environment[name]
        self._daemons: "list[subprocess.Popen[bytes]]" = []

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: "type[BaseException] | None", error: "BaseException | None", trace: "TracebackType | None"
    ) -> None:
        if len(self._daemons) > 1:
            with suppress(AssertionError, subprocess.TimeoutExpired, OSError):
                self.command("scancel", "--user", getpass.getuser())
                deadline = time.monotonic() + END_SECONDS
                while self.command("squeue", "--noheader") and time.monotonic() < deadline:
                    time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._end_jobs()
        shutil.rmtree(self._place, ignore_errors=True)

    def command(self, *words: str, timeout: float = 30) -> str:
        """Standard output of one of SLURM's commands, which must succeed."""
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, env=self.environment)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def submit(self, *words: str, cwd: Path, **settings: str) -> str:
        """Id of the new job; ``settings`` are environment variables."""
        command = ["sbatch", "--parsable", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=30, cwd=cwd, env=self.environment | settings
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """As squeue gives it: PENDING, RUNNING, COMPLETING, COMPLETED..."""
        return self.command("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").strip()

    def wait(self, job: str, seconds: float) -> str:
        """The state in which the job ends."""
        deadline = time.monotonic() + seconds
        while (state := self.state(job)) not in ENDED:
            assert time.monotonic() < deadline, f"job {job} is still {state} after {seconds} s\n{self.logs()}"
            time.sleep(0.3)
        return state

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        texts = [f"{log.name}:\n{log.read_text(errors='replace')[-1500:]}" for log in sorted(self._place.glob("*.log"))]
        return "\n".join(texts)

    def _start(self) -> None:
        place, user = self._place, getpass.getuser()
        for name in ("state", "n1", "n2"):
            (place / name).mkdir()
        place.chmod(0o755)
        (place / "munge.key").write_bytes(os.urandom(128))
        (place / "munge.key").chmod(0o400)
        plugins = next(
            (p for p in ("/usr/lib/x86_64-linux-gnu/slurm-wlm", "/usr/lib64/slurm") if os.path.isdir(p)), None
        )
        text = _CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0], user=user, place=place, ports=_free_ports(3), plugins=plugins
        )
        if plugins is None:
            text = text.replace("PluginDir=None\n", "")
        self._configuration.write_text(text)
        names = ("socket", "pid-file", "log-file", "seed-file", "key-file")
        ends = ("munge.socket", "munge.pid", "munged.log", "munge.seed", "munge.key")
        self._run("munged", "--foreground", *(f"--{name}={place / end}" for name, end in zip(names, ends)))
        self._until(lambda: (place / "munge.socket").exists())
        self._run("slurmctld", "-D", "-f", str(self._configuration))
        for node in ("n1", "n2"):
            self._run("slurmd", "-D", "-N", node, "-f", str(self._configuration))
        self._until(self._idle)

    def _run(self, name: str, *words: str) -> None:
        output = open(self._place / f"{name}-{len(self._daemons)}.out.log", "wb")  # noqa: SIM115
        with output:
            daemon = subprocess.Popen([program(name), *words], stdout=output, stderr=output, env=self.environment)
        self._daemons.append(daemon)

    def _idle(self) -> bool:
        command = ["sinfo", "--noheader", "--Node", "--format=%T"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=self.environment)
        return done.stdout.split() == ["idle", "idle"]

    def _until(self, true: "object") -> None:
        deadline = time.monotonic() + START_SECONDS
        while not true():
            ended = [daemon.args[0] for daemon in self._daemons if daemon.poll() is not None]
            assert not ended and time.monotonic() < deadline, f"SLURM did not start ({ended} ended)\n{self.logs()}"
            time.sleep(0.1)

    def _end_jobs(self) -> None:
        """Job steps outlive their slurmd: end those of this cluster, which hold its log open or know its configuration."""
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:
            left = [process for process in psutil.process_iter() if self._is_ours(process)]
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            if not left:
                return
            time.sleep(0.2)

    def _is_ours(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error, OSError):
            # A sweeper ends when it has removed its files, which is what the tests look at.
            if process.pid == os.getpid() or "mlp-offload-sweeper" in process.cmdline():
                return False
            if process.environ().get("SLURM_CONF") == str(self._configuration):
                return True
            for entry in os.scandir(f"/proc/{process.pid}/fd"):
                with suppress(OSError):
                    if os.readlink(entry.path).startswith(f"{self._place}/"):
                        return True
        return False


def _free_ports(count: int) -> "list[int]":
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
