"""Reading a task's TASK.json from the bucket: the one place where a manifest on its way to the daemon is parsed."""

from mqmk.daemon.bucket.store import TASKS, Store
from mqmk.learner.data.manifest import FILE_NAME, MAX_FILE_BYTES, Manifest, parse_manifest
from mqmk.learner.errors import TaskRejected


def read_manifest(store: Store, folder: str) -> Manifest | TaskRejected:
    """The manifest of a folder, or why it cannot be used; FileNotFoundError if there is none."""
    with store.open_file(f"{TASKS}/{folder}", FILE_NAME) as file:
        data = file.read(MAX_FILE_BYTES + 1)  # one byte more, so that the parser can reject a file that is too long
    try:
        return parse_manifest(data)
    except TaskRejected as error:
        return error
