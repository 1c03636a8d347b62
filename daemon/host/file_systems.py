"""Which file system a folder is on: SQLite's write-ahead log and kernel locks need a local one.

https://sqlite.org/wal.html: "all processes using a database must be on the same host computer; WAL does not work over
a network filesystem".
"""

import re
from pathlib import Path
from typing import Final

from mqmk.daemon.errors import DaemonError

MOUNTS: Final = Path("/proc/self/mountinfo")
NETWORK: Final = frozenset(
    {"afs", "beegfs", "blobfuse", "blobfuse2", "ceph", "ceph-fuse", "cephfs", "cifs", "coda", "davfs", "gcsfuse",
     "glusterfs", "goofys", "gpfs", "juicefs", "lustre", "mfs", "moosefs", "mount-s3", "nfs", "nfs4", "orangefs",
     "ncpfs", "pvfs2", "rclone", "s3fs", "seaweedfs", "smb3", "smbfs", "sshfs"}
)  # fmt: skip
"""Names in the kernel, also with the prefix `fuse.`."""


def file_system(path: Path, mounts: Path = MOUNTS) -> str | None:
    """The type of the file system of a path, which need not exist yet; None if unknown."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return None
    target, found = path.resolve(), None
    longest = -1
    for line in lines:
        point, kind = _parse_mount(line)
        if target.is_relative_to(point) and len(point.parts) >= longest:  # a later mount hides an earlier one
            longest, found = len(point.parts), kind
    return found


def refuse_network_file_system(folder: Path, mounts: Path = MOUNTS) -> None:
    """DaemonError if the folder is on a network file system, where the ledger could be damaged."""
    kind = file_system(folder, mounts)
    if kind is not None and kind.removeprefix("fuse.") in NETWORK:
        raise DaemonError(
            f"{folder} is on a network file system ({kind}), where the ledger (SQLite with a write-ahead log) and the "
            "daemon's lock are not safe; set state.dir to a local disk, and pools.url for replicas on other machines"
        )


def _parse_mount(line: str) -> tuple[Path, str]:
    """Mount point and type of a line; spaces in a path are octal escapes, such as \\040."""
    own, _, rest = line.partition(" - ")
    point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), own.split(" ")[4])
    return Path(point), rest.split(" ")[0]
