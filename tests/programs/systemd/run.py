"""The units of deploy/systemd under a real systemd, installed as docs/operations.md describes: `make systemd-test`.

A separate systemd boots as process 1 in namespaces, over a temporary copy of this machine's files; the machine itself
is not changed. The daemon learns in its sandbox, is killed, hangs, is stopped and started while clients send requests,
and the machine is rebooted. Prints the results as one JSON line. Needs root, systemd and Debian's Python 3.11.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

from programs.chaos.clients import Clients, sample_images
from support.daemons.daemon import class_folders

ROOT: Final = Path(__file__).resolve().parents[3]
VENV: Final = ROOT / "build" / "systemd-opt-mqmk"
"""Installed as /opt/mqmk; kept for the next run."""
URL: Final = "http://127.0.0.1:8000"
TIMEOUT_SECONDS: Final = 300.0
MINIMAL_ENVIRONMENT: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "TERM": "linux", "LANG": "C.UTF-8"}
BOOTED: Final = ("running\n", "degraded\n")
"""Degraded: another service of this machine does not start in namespaces."""
WATCHDOG: Final = "[Service]\nWatchdogSec=15\nTimeoutAbortSec=5\n"
_UNSHARE: Final = ("unshare", "--propagation", "private", "--mount")
_COPY: Final = """
set -e
ip link set lo up
mkdir -p "$1/copy" && mount -t tmpfs -o size=4G tmpfs "$1/copy"
mkdir -p "$1/copy/upper" "$1/copy/work" "$1/copy/root" "$1/cgroup"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/copy/upper,workdir=$1/copy/work" "$1/copy/root"
mkdir -p "$1/copy/root/opt/mqmk" && mount --bind "$2" "$1/copy/root/opt/mqmk"
mount --bind "$3" "$1/copy/root/srv"
mount -t cgroup2 cgroup2 "$1/cgroup"
shift 3
exec "$@"
"""
"""Run once: the files survive a reboot. /opt/mqmk and /srv (the sources) are bind mounts."""
_BOOT: Final = """
set -e
root=$1
mount -t proc proc $root/proc
mount -t sysfs sysfs $root/sys
mount -t cgroup2 cgroup2 $root/sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs $root/run
mount -t tmpfs -o mode=755 tmpfs $root/dev
for each in null zero full random urandom tty; do touch $root/dev/$each; mount --bind /dev/$each $root/dev/$each; done
mkdir $root/dev/shm $root/dev/pts && mount -t tmpfs -o mode=1777 tmpfs $root/dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts $root/dev/pts
ln -s pts/ptmx $root/dev/ptmx && ln -s /proc/self/fd $root/dev/fd
cd $root && mkdir -p old && pivot_root . old && umount -l /old
hostname mqmk-test
exec env -i container=mqmk-test TERM=linux /lib/systemd/systemd --system --unit=multi-user.target --log-target=journal
"""
"""Run at every boot; process 1 becomes systemd."""


def documented_commands(first_word: str) -> list[str]:
    """The commands of the block in the operations guide that starts like this."""
    found = re.search(
        rf"^```\n({first_word}.*?)^```", (ROOT / "docs" / "operations.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert found, f"docs/operations.md has no block that starts with {first_word!r}"
    return found[1].splitlines()


@dataclass
class Machine:
    """A systemd in namespaces, and commands inside it."""

    folder: Path
    process: subprocess.Popen[bytes] | None = None
    init_pid: int = 0
    """Host pid of its process 1."""

    def boot(self) -> None:
        self.group.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [*_UNSHARE, "--pid", "--fork", "--kill-child", "--ipc", "--cgroup",
             "sh", "-c", _BOOT, "sh", self.folder / "copy" / "root"],
            preexec_fn=self._join_group,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while not (self._find_init() and self.run("systemctl", "is-system-running", "--wait", check=False) in BOOTED):
            assert self.process.poll() is None and time.monotonic() < deadline, "systemd does not boot"
            time.sleep(0.2)

    @property
    def group(self) -> Path:
        """The control group that is the root of its hierarchy."""
        return self.folder / "cgroup" / f"mqmk-{os.getpid()}"

    def _join_group(self) -> None:
        (self.folder / "cgroup" / f"mqmk-{os.getppid()}" / "cgroup.procs").write_text(str(os.getpid()))

    def _find_init(self) -> bool:
        with suppress(OSError, IndexError):
            assert self.process is not None
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            self.init_pid = int(children[0])
            return Path(f"/proc/{self.init_pid}/comm").read_text().strip() == "systemd"
        return False

    def power_off(self) -> None:
        """Kill every process at once."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def remove(self) -> None:
        """Kill it and remove its control groups."""
        self.power_off()
        while "populated 1" in (self.group / "cgroup.events").read_text():
            time.sleep(0.05)
        for folder, _, _ in os.walk(self.group, topdown=False):
            Path(folder).rmdir()

    def run(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(
            ["nsenter", f"--target={self.init_pid}", "--mount", "--pid", "--ipc", "--cgroup",
             "sh", "-c", 'cd /srv && exec "$@"', "sh", *command],
            capture_output=True, text=True, env=MINIMAL_ENVIRONMENT, timeout=TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.journal()}"
        return done.stdout

    def run_mqmk(self, *words: str, check: bool = True) -> str:
        """Run `mqmk-daemon` as the user of the service."""
        return self.run("runuser", "-u", "mqmk", "--", "/opt/mqmk/bin/mqmk-daemon", *words,
                        "--state", "/var/lib/mqmk", check=check)  # fmt: skip

    def journal(self) -> str:
        return self.run("journalctl", "--no-pager", "--lines=40", check=False)

    def property(self, name: str) -> str:
        return self.run("systemctl", "show", "--value", f"--property={name}", "mqmk-daemon").strip()

    def host_pid(self, pid: str) -> int:
        """Host pid of one of its processes."""
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                numbers = re.search(r"^NSpid:\s+(.*)$", (folder / "status").read_text(), re.MULTILINE)
                if numbers and numbers[1].split()[1:] == [pid] and self._is_inside(folder):
                    return int(folder.name)
        raise AssertionError(f"no process {pid} in the namespace")

    def _is_inside(self, folder: Path) -> bool:
        return (folder / "ns" / "pid").readlink() == Path(f"/proc/{self.init_pid}/ns/pid").readlink()


@dataclass
class SystemdTest:
    """One run of the scenario."""

    machine: Machine
    results: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def run(self) -> None:
        self.machine.boot()
        self._install()
        self._check_sandbox()
        self._learn("sea")
        with Clients(URL, sample_images(["crab", "whale"]), count=2) as self.clients:
            self._expect_no_failed_request("killed with -9", self._kill)
            self._learn("birds")
            self._expect_no_failed_request("stop --keep-serving, systemctl start", self._apply_settings)
            self._expect_no_failed_request("hung, killed by the watchdog", self._hang)
            self._expect_no_failed_request("backed up", self._back_up)
        self._measure_outage("systemctl restart", self._restart)
        self._measure_outage("power cut, boot", self._reboot)
        self._learn("fruit")
        self._measure_outage("restored", self._restore)
        self._expect_served("fruit")  # newer than the backup, but still in the bucket
        self._stop()

    # The scenario

    def _install(self) -> None:
        for line in documented_commands("useradd"):
            if "/opt/mqmk/bin/pip" not in line:  # done before the network was cut
                self.machine.run("sh", "-ec", line)
        if self.machine.property("ActiveState") != "active":
            self.problems.append("the unit is not active after enable --now")

    def _check_sandbox(self) -> None:
        status = Path(f"/proc/{self.machine.host_pid(self._main_pid())}/status").read_text()
        rights = dict(re.findall(r"^(NoNewPrivs|Seccomp|CapBnd|CapEff):\s+(\S+)$", status, re.MULTILINE))
        self.results["rights"] = rights
        none = "0" * 16
        if rights != {"NoNewPrivs": "1", "Seccomp": "2", "CapBnd": none, "CapEff": none}:
            self.problems.append(f"the sandbox is not on: {rights}")

    def _learn(self, theme: str) -> None:
        started = time.monotonic()
        source = f"/srv/build/{self.machine.folder.name}/{theme}"
        shutil.copytree(class_folders(theme, 40), ROOT / "build" / self.machine.folder.name / theme)
        self.machine.run("chmod", "-R", "a+rX", f"/srv/build/{self.machine.folder.name}")
        self.machine.run("runuser", "-u", "mqmk", "--", "/opt/mqmk/bin/mqmk-daemon", "pack", source,
                         "/var/lib/mqmk/bucket/tasks", "--task", theme)  # fmt: skip
        self._expect_served(theme)
        self.results.setdefault("learned and served, s", {})[theme] = round(time.monotonic() - started, 1)

    def _expect_served(self, theme: str) -> None:
        output = self.machine.run_mqmk("show", theme, "--wait", "240", check=False)
        if f"{theme}: SERVING" not in output:
            self.problems.append(f"{theme} is not served: {output}")

    def _kill(self) -> None:
        before = self._main_pid()
        os.kill(self.machine.host_pid(before), signal.SIGKILL)
        self._wait_until(lambda: self._is_restarted(before), "systemd restarts it")

    def _apply_settings(self) -> None:
        """Apply other settings (a shorter watchdog) without interrupting serving."""
        folder = "/etc/systemd/system/mqmk-daemon.service.d"
        self.machine.run("sh", "-ec", f"mkdir {folder}; printf '{WATCHDOG}' > {folder}/w.conf; systemctl daemon-reload")
        self.machine.run_mqmk("stop", "--keep-serving")
        self._wait_until(
            lambda: self.machine.property("ActiveState") == "inactive", "the unit becomes inactive, not failed"
        )
        self.machine.run("systemctl", "start", "mqmk-daemon")

    def _hang(self) -> None:
        before = self._main_pid()
        os.kill(self.machine.host_pid(before), signal.SIGSTOP)
        self._wait_until(lambda: self._is_restarted(before), "the watchdog kills it and systemd restarts it")

    def _back_up(self) -> None:
        self.machine.run("systemctl", "start", "mqmk-backup.service")
        checked = "cd /var/lib/mqmk-backups/* && sha256sum --check --quiet SHA256SUMS && cat BACKUP.json"
        self.results["versions in the backup"] = json.loads(self.machine.run("sh", "-ec", checked))["versions"]

    def _restart(self) -> None:
        self.machine.run("systemctl", "restart", "mqmk-daemon")

    def _reboot(self) -> None:
        self.machine.power_off()
        self.machine.boot()

    def _restore(self) -> None:
        """Restore the backup made before the last task."""
        (backup,) = self.machine.run("ls", "/var/lib/mqmk-backups").split()
        lines = [
            re.sub(r"(/mqmk-backups)/\S+", rf"\1/{backup}", line) for line in documented_commands("systemctl stop")
        ]
        for line in lines[:-1]:
            self.machine.run("sh", "-ec", line)
        status = json.loads(self.machine.run_mqmk("status", "--json", check=False))
        if (status["pool_version"], len(status["tasks"])) != (2, 2):
            self.problems.append(f"the restored state differs: {status}")
        self.machine.run("sh", "-ec", lines[-1])

    def _stop(self) -> None:
        started = time.monotonic()
        self.machine.run("systemctl", "stop", "mqmk-daemon")
        self.results["stop, s"] = round(time.monotonic() - started, 1)
        if left := self.machine.run("pgrep", "--uid", "mqmk", "--list-full", check=False):
            self.problems.append(f"left after the stop: {left}")
        if (result := self.machine.property("Result")) != "success":
            self.problems.append(f"stopped with {result}")

    # Observations

    def _expect_no_failed_request(self, what: str, action: Callable[[], None]) -> None:
        started, count = time.monotonic(), len(self.clients.records)
        action()
        self._wait_until(lambda: self.machine.property("ActiveState") == "active", f"{what}: active again")
        seconds = round(time.monotonic() - started, 1)
        time.sleep(2)
        records = self.clients.records[count:]
        failed = [record for record in records if record.error]
        self.results[what] = {"requests": len(records), "failed": len(failed), "s": seconds}
        if failed or not records:
            self.problems.append(f"{what}: {len(failed)} of {len(records)} requests failed: {failed[:1]}")

    def _measure_outage(self, what: str, action: Callable[[], object]) -> None:
        started = time.monotonic()
        action()
        self._wait_until(self._is_answering, f"{what}: predictions are back")
        self.results[what] = {"s until an answer": round(time.monotonic() - started, 1)}

    def _is_answering(self) -> bool:
        with suppress(OSError), urlopen(f"{URL}/predict", sample_images(["crab"])["crab"], timeout=5) as answer:
            return bool(json.load(answer)["label"])
        return False

    def _main_pid(self) -> str:
        return self.machine.property("MainPID")

    def _is_restarted(self, before: str) -> bool:
        return self._main_pid() not in ("0", before) and self.machine.property("ActiveState") == "active"

    def _wait_until(self, what: Callable[[], bool], why: str) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not what():
            assert time.monotonic() < deadline, f"{why}: not within {TIMEOUT_SECONDS:g} s\n{self.machine.journal()}"
            time.sleep(0.3)


def unavailable_reason() -> str | None:
    """Why a separate systemd cannot run here; None if it can."""
    if os.getuid() != 0:
        return "a separate systemd needs root"
    missing = [name for name in ("systemctl", "nsenter", "unshare", "runuser", "ip") if not shutil.which(name)]
    missing += [] if Path("/lib/systemd/systemd").exists() else ["systemd"]
    return f"not installed: {', '.join(missing)}" if missing else None


def install() -> None:
    """Run the documented line that needs the package index, with /opt/mqmk mounted from the build folder."""
    line = next(line for line in documented_commands("useradd") if "/opt/mqmk/bin/pip" in line)
    if (VENV / "line").exists() and (VENV / "line").read_text() == line:
        line = "/opt/mqmk/bin/pip install --quiet --no-deps --force-reinstall ."  # the dependencies are unchanged
    VENV.mkdir(parents=True, exist_ok=True)
    mounted = f"mkdir -p /opt/mqmk && mount --bind {VENV} /opt/mqmk && cd {ROOT} && {line}"
    environ = {**os.environ, "PATH": MINIMAL_ENVIRONMENT["PATH"], "PIP_QUIET": "1"}
    subprocess.run([*_UNSHARE, "sh", "-ec", mounted], env=environ, check=True)
    with suppress(OSError):
        Path("/opt/mqmk").rmdir()  # the mount point, unless the machine has its own files there
    if "venv" in line:
        (VENV / "line").write_text(line)


def main() -> None:
    if reason := unavailable_reason():
        sys.exit(reason)
    if len(sys.argv) == 1:
        install()
        folder = Path(tempfile.mkdtemp(prefix="mqmk-systemd-"))
        inside = [
            "sh",
            "-c",
            _COPY,
            "sh",
            folder,
            VENV,
            ROOT,
            sys.executable,
            "-m",
            "programs.systemd.run",
            folder,
        ]
        code = subprocess.run([*_UNSHARE, "--net", "--uts", *inside], check=False).returncode
        shutil.rmtree(folder)
        sys.exit(code)
    machine = Machine(Path(sys.argv[1]))
    test = SystemdTest(machine)
    try:
        test.run()
    finally:
        machine.remove()
        shutil.rmtree(ROOT / "build" / machine.folder.name, ignore_errors=True)
    print(json.dumps(test.results | {"problems": test.problems}), flush=True)
    sys.exit(int(bool(test.problems)))


if __name__ == "__main__":
    main()
