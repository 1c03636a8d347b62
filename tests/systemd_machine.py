"""The units of deploy/systemd under a real systemd, installed as docs/operations.md says: `make systemd-test`.

A systemd of its own boots as process 1 in namespaces, over a copy of this machine that vanishes afterwards; nothing
here is changed. The daemon learns in its sandbox, is killed, hangs, is stopped and started while clients ask, and the
machine is rebooted. Prints one JSON line of what happened. Needs root, systemd, and Debian's own Python 3.11.
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

from chaos_clients import Clients, pictures
from daemon_parts import class_folders

ROOT: Final = Path(__file__).resolve().parent.parent
ENVIRONMENT: Final = ROOT / "build" / "systemd-opt-mqmk"
"""What is installed into /opt/mqmk; it stays for the next run."""
URL: Final = "http://127.0.0.1:8000"
PATIENCE: Final = 300.0
PLAIN: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "TERM": "linux", "LANG": "C.UTF-8"}
BOOTED: Final = ("running\n", "degraded\n")
"""Degraded: some other service of this machine does not start in namespaces."""
WATCHDOG: Final = "[Service]\nWatchdogSec=15\nTimeoutAbortSec=5\n"
_APART: Final = ("unshare", "--propagation", "private", "--mount")
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
"""Once: files that survive a reboot. /opt/mqmk and /srv (the sources) are real ones."""
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
"""At every boot; process 1 becomes systemd."""


def documented(first: str) -> list[str]:
    """What the operating guide tells to type: the block that begins like this."""
    found = re.search(
        rf"^```\n({first}.*?)^```", (ROOT / "docs" / "operations.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert found, f"docs/operations.md has no block that begins with {first!r}"
    return found[1].splitlines()


@dataclass
class Machine:
    """A systemd in namespaces, and how to be on it."""

    folder: Path
    process: subprocess.Popen[bytes] | None = None
    first: int = 0
    """Process 1, as it is numbered outside."""

    def boot(self) -> None:
        self.group.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [*_APART, "--pid", "--fork", "--kill-child", "--ipc", "--cgroup",
             "sh", "-c", _BOOT, "sh", self.folder / "copy" / "root"],
            preexec_fn=self._join_group,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while not (self._find() and self.run("systemctl", "is-system-running", "--wait", check=False) in BOOTED):
            assert self.process.poll() is None and time.monotonic() < deadline, "systemd does not boot"
            time.sleep(0.2)

    @property
    def group(self) -> Path:
        """The control group that is the root of its own."""
        return self.folder / "cgroup" / f"mqmk-{os.getpid()}"

    def _join_group(self) -> None:
        (self.folder / "cgroup" / f"mqmk-{os.getppid()}" / "cgroup.procs").write_text(str(os.getpid()))

    def _find(self) -> bool:
        with suppress(OSError, IndexError):
            assert self.process is not None
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            self.first = int(children[0])
            return Path(f"/proc/{self.first}/comm").read_text().strip() == "systemd"
        return False

    def cut_the_power(self) -> None:
        """Every process at once."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def scrap(self) -> None:
        """Leave nothing behind."""
        self.cut_the_power()
        while "populated 1" in (self.group / "cgroup.events").read_text():
            time.sleep(0.05)
        for folder, _, _ in os.walk(self.group, topdown=False):
            Path(folder).rmdir()

    def run(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(
            ["nsenter", f"--target={self.first}", "--mount", "--pid", "--ipc", "--cgroup",
             "sh", "-c", 'cd /srv && exec "$@"', "sh", *command],
            capture_output=True, text=True, env=PLAIN, timeout=PATIENCE, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.journal()}"
        return done.stdout

    def ours(self, *words: str, check: bool = True) -> str:
        """Our command, as the user of the service."""
        return self.run("runuser", "-u", "mqmk", "--", "/opt/mqmk/bin/mqmk-daemon", *words,
                        "--state", "/var/lib/mqmk", check=check)  # fmt: skip

    def journal(self) -> str:
        return self.run("journalctl", "--no-pager", "--lines=40", check=False)

    def property(self, name: str) -> str:
        return self.run("systemctl", "show", "--value", f"--property={name}", "mqmk-daemon").strip()

    def outside(self, pid: str) -> int:
        """A process as it is numbered here."""
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                numbers = re.search(r"^NSpid:\s+(.*)$", (folder / "status").read_text(), re.MULTILINE)
                if numbers and numbers[1].split()[1:] == [pid] and self._is_here(folder):
                    return int(folder.name)
        raise AssertionError(f"no process {pid} there")

    def _is_here(self, folder: Path) -> bool:
        return (folder / "ns" / "pid").readlink() == Path(f"/proc/{self.first}/ns/pid").readlink()


@dataclass
class Proof:
    """One run."""

    machine: Machine
    found: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def run(self) -> None:
        self.machine.boot()
        self._install()
        self._in_its_sandbox()
        self._learn("sea")
        with Clients(URL, pictures(["crab", "whale"]), count=2) as self.clients:
            self._without_a_failed_request("killed with -9", self._killed)
            self._learn("birds")
            self._without_a_failed_request("stop --keep-serving, systemctl start", self._new_settings)
            self._without_a_failed_request("hung, ended by the watchdog", self._hung)
            self._without_a_failed_request("backed up", self._back_up)
        self._away_until_it_is_back("systemctl restart", self._restart)
        self._away_until_it_is_back("power cut, boot", self._reboot)
        self._learn("fruit")
        self._away_until_it_is_back("restored", self._restore)
        self._expect_served("fruit")  # which came after the backup, and is still in the bucket
        self._stop()

    # What happens

    def _install(self) -> None:
        for line in documented("useradd"):
            if "/opt/mqmk/bin/pip" not in line:  # done before there was no network any more
                self.machine.run("sh", "-ec", line)
        if self.machine.property("ActiveState") != "active":
            self.problems.append("enable --now did not end with an active unit")

    def _in_its_sandbox(self) -> None:
        status = Path(f"/proc/{self.machine.outside(self._main())}/status").read_text()
        rights = dict(re.findall(r"^(NoNewPrivs|Seccomp|CapBnd|CapEff):\s+(\S+)$", status, re.MULTILINE))
        self.found["rights"] = rights
        none = "0" * 16
        if rights != {"NoNewPrivs": "1", "Seccomp": "2", "CapBnd": none, "CapEff": none}:
            self.problems.append(f"the sandbox is not on: {rights}")

    def _learn(self, theme: str) -> None:
        begun = time.monotonic()
        source = f"/srv/build/{self.machine.folder.name}/{theme}"
        shutil.copytree(class_folders(theme, 40), ROOT / "build" / self.machine.folder.name / theme)
        self.machine.run("chmod", "-R", "a+rX", f"/srv/build/{self.machine.folder.name}")
        self.machine.run("runuser", "-u", "mqmk", "--", "/opt/mqmk/bin/mqmk-daemon", "pack", source,
                         "/var/lib/mqmk/bucket/tasks", "--task", theme)  # fmt: skip
        self._expect_served(theme)
        self.found.setdefault("learned and served, s", {})[theme] = round(time.monotonic() - begun, 1)

    def _expect_served(self, theme: str) -> None:
        said = self.machine.ours("show", theme, "--wait", "240", check=False)
        if f"{theme}: SERVING" not in said:
            self.problems.append(f"{theme} is not served: {said}")

    def _killed(self) -> None:
        before = self._main()
        os.kill(self.machine.outside(before), signal.SIGKILL)
        self._until(lambda: self._restarted(before), "systemd starts it again")

    def _new_settings(self) -> None:
        """Such as another watchdog, without an interruption."""
        folder = "/etc/systemd/system/mqmk-daemon.service.d"
        self.machine.run("sh", "-ec", f"mkdir {folder}; printf '{WATCHDOG}' > {folder}/w.conf; systemctl daemon-reload")
        self.machine.ours("stop", "--keep-serving")
        self._until(lambda: self.machine.property("ActiveState") == "inactive", "the unit ends, and is not failed")
        self.machine.run("systemctl", "start", "mqmk-daemon")

    def _hung(self) -> None:
        before = self._main()
        os.kill(self.machine.outside(before), signal.SIGSTOP)
        self._until(lambda: self._restarted(before), "the watchdog ends it, and it is started again")

    def _back_up(self) -> None:
        self.machine.run("systemctl", "start", "mqmk-backup.service")
        checked = "cd /var/lib/mqmk-backups/* && sha256sum --check --quiet SHA256SUMS && cat BACKUP.json"
        self.found["versions in the backup"] = json.loads(self.machine.run("sh", "-ec", checked))["versions"]

    def _restart(self) -> None:
        self.machine.run("systemctl", "restart", "mqmk-daemon")

    def _reboot(self) -> None:
        self.machine.cut_the_power()
        self.machine.boot()

    def _restore(self) -> None:
        """The backup from before the last task."""
        (backup,) = self.machine.run("ls", "/var/lib/mqmk-backups").split()
        lines = [re.sub(r"(/mqmk-backups)/\S+", rf"\1/{backup}", line) for line in documented("systemctl stop")]
        for line in lines[:-1]:
            self.machine.run("sh", "-ec", line)
        status = json.loads(self.machine.ours("status", "--json", check=False))
        if (status["pool_version"], len(status["tasks"])) != (2, 2):
            self.problems.append(f"restored, it is not as it was: {status}")
        self.machine.run("sh", "-ec", lines[-1])

    def _stop(self) -> None:
        begun = time.monotonic()
        self.machine.run("systemctl", "stop", "mqmk-daemon")
        self.found["stopped, s"] = round(time.monotonic() - begun, 1)
        if left := self.machine.run("pgrep", "--uid", "mqmk", "--list-full", check=False):
            self.problems.append(f"left after the stop: {left}")
        if (result := self.machine.property("Result")) != "success":
            self.problems.append(f"stopped with {result}")

    # How it is seen

    def _without_a_failed_request(self, what: str, happens: Callable[[], None]) -> None:
        begun, count = time.monotonic(), len(self.clients.samples)
        happens()
        self._until(lambda: self.machine.property("ActiveState") == "active", f"{what}: active again")
        seconds = round(time.monotonic() - begun, 1)
        time.sleep(2)
        samples = self.clients.samples[count:]
        failed = [sample for sample in samples if sample.error]
        self.found[what] = {"requests": len(samples), "failed": len(failed), "s": seconds}
        if failed or not samples:
            self.problems.append(f"{what}: {len(failed)} of {len(samples)} requests failed: {failed[:1]}")

    def _away_until_it_is_back(self, what: str, happens: Callable[[], object]) -> None:
        begun = time.monotonic()
        happens()
        self._until(self._answers, f"{what}: predictions are back")
        self.found[what] = {"s until an answer": round(time.monotonic() - begun, 1)}

    def _answers(self) -> bool:
        with suppress(OSError), urlopen(f"{URL}/predict", pictures(["crab"])["crab"], timeout=5) as answer:
            return bool(json.load(answer)["label"])
        return False

    def _main(self) -> str:
        return self.machine.property("MainPID")

    def _restarted(self, before: str) -> bool:
        return self._main() not in ("0", before) and self.machine.property("ActiveState") == "active"

    def _until(self, what: Callable[[], bool], why: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not what():
            assert time.monotonic() < deadline, f"{why}: not within {PATIENCE:g} s\n{self.machine.journal()}"
            time.sleep(0.3)


def refusal() -> str | None:
    """Why there can be no systemd here; None if there can."""
    if os.getuid() != 0:
        return "a systemd of its own needs root"
    missing = [name for name in ("systemctl", "nsenter", "unshare", "runuser", "ip") if not shutil.which(name)]
    missing += [] if Path("/lib/systemd/systemd").exists() else ["systemd"]
    return f"not installed: {', '.join(missing)}" if missing else None


def install() -> None:
    """The documented line that needs the package registry, with /opt/mqmk in our build folder."""
    line = next(line for line in documented("useradd") if "/opt/mqmk/bin/pip" in line)
    if (ENVIRONMENT / "line").exists() and (ENVIRONMENT / "line").read_text() == line:
        line = "/opt/mqmk/bin/pip install --quiet --no-deps --force-reinstall ."  # only our code may have changed
    ENVIRONMENT.mkdir(parents=True, exist_ok=True)
    mounted = f"mkdir -p /opt/mqmk && mount --bind {ENVIRONMENT} /opt/mqmk && cd {ROOT} && {line}"
    environ = {**os.environ, "PATH": PLAIN["PATH"], "PIP_QUIET": "1"}
    subprocess.run([*_APART, "sh", "-ec", mounted], env=environ, check=True)
    with suppress(OSError):
        Path("/opt/mqmk").rmdir()  # where it was mounted, if nothing of the machine's own is there
    if "venv" in line:
        (ENVIRONMENT / "line").write_text(line)


def main() -> None:
    if reason := refusal():
        sys.exit(reason)
    if len(sys.argv) == 1:
        install()
        folder = Path(tempfile.mkdtemp(prefix="mqmk-systemd-"))
        inside = ["sh", "-c", _COPY, "sh", folder, ENVIRONMENT, ROOT, sys.executable, __file__, folder]
        code = subprocess.run([*_APART, "--net", "--uts", *inside], check=False).returncode
        shutil.rmtree(folder)
        sys.exit(code)
    machine = Machine(Path(sys.argv[1]))
    proof = Proof(machine)
    try:
        proof.run()
    finally:
        machine.scrap()
        shutil.rmtree(ROOT / "build" / machine.folder.name, ignore_errors=True)
    print(json.dumps(proof.found | {"problems": proof.problems}), flush=True)
    sys.exit(int(bool(proof.problems)))


if __name__ == "__main__":
    main()
