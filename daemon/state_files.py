"""Which file is where in the state directory, and how trained tasks and held-out pictures are kept there.

ledger.sqlite                 the ledger
pools/<n>-<digest12>/         pool versions, and CURRENT
candidates/<n>-<digest12>/    a version that is evaluated but not announced
work/<identity>/              base/ (what training began with), checkpoint.safetensors, and 0-<digest12>/: the trained
                              prompt as a pool of one, which is the sign that training is done
held-out/<identity>.safetensors   pictures kept for evaluation only
evaluations/<digest>.safetensors  queries of those pictures, so that the next version computes only what is new
evaluations/<digest>/         tables and figures of a version's evaluation
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from mqmk.matcher.durable import replace_file, write_folder
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_files import CARD, TENSORS, PoolFiles, decode, read_pool
from mqmk.matcher.pool_store import PoolStore


@dataclass(frozen=True)
class StateFiles:
    """The files of one state directory."""

    folder: Path

    @property
    def store(self) -> PoolStore:
        """The pool versions."""
        return PoolStore(self.folder / "pools")

    @property
    def candidates(self) -> Path:
        """Versions that are not announced yet."""
        return self.folder / "candidates"

    def held_out(self, identity: str) -> Path:
        """The held-out pictures of a task."""
        return self.folder / "held-out" / f"{identity}.safetensors"

    def queries(self, digest: str) -> Path:
        """The queries of all held-out pictures for one version."""
        return self.folder / "evaluations" / f"{digest}.safetensors"

    def evaluation(self, digest: str) -> Path:
        """The folder with tables and figures of a version's evaluation, for people."""
        return self.folder / "evaluations" / digest

    def work(self, identity: str) -> Path:
        """Where a task's training keeps its files."""
        return self.folder / "work" / identity

    def checkpoint(self, identity: str) -> bytes | None:
        """The state of the last whole epoch."""
        path = self.work(identity) / "checkpoint.safetensors"
        return path.read_bytes() if path.exists() else None

    def save_checkpoint(self, identity: str, data: bytes) -> None:
        """Keep an epoch; durable when this returns."""
        self.work(identity).mkdir(parents=True, exist_ok=True)
        replace_file(self.work(identity) / "checkpoint.safetensors", data)

    def trained(self, identity: str) -> Path | None:
        """The folder of the trained prompt, None while there is none."""
        return next(iter(self.work(identity).glob("0-*")), None)

    def read_trained(self, identity: str) -> PromptPool:
        """The trained prompt as a pool of one."""
        folder = self.trained(identity)
        if folder is None:
            raise FileNotFoundError(f"{self.work(identity)}: no trained prompt")
        return read_pool(folder)[1]

    def save_trained(self, identity: str, prompt: PoolFiles) -> Path:
        """Keep a trained prompt; it appears whole or not at all."""
        version, _ = decode(prompt)
        return self._save(self.work(identity) / version.folder, prompt)

    def base(self, identity: str) -> PoolFiles | None:
        """What the task's training began with."""
        folder = self.work(identity) / "base"
        return PoolFiles((folder / TENSORS).read_bytes(), (folder / CARD).read_bytes()) if folder.is_dir() else None

    def save_base(self, identity: str, base: PoolFiles) -> None:
        """Fix what the task's training begins with: a training that is resumed must begin with the same."""
        self._save(self.work(identity) / "base", base)

    def _save(self, final: Path, files: PoolFiles) -> Path:
        write_folder(final, {TENSORS: files.tensors, CARD: files.card})
        return final

    def clear_work(self, identity: str) -> None:
        """Forget everything that training made."""
        shutil.rmtree(self.work(identity), ignore_errors=True)

    def purge(self, identity: str) -> None:
        """Remove everything about a task's data that is not a published version."""
        self.clear_work(identity)
        self.held_out(identity).unlink(missing_ok=True)
        current = self.store.current()
        for path in (self.folder / "evaluations").glob("*.safetensors"):  # queries of its pictures are among them
            if current is None or path != self.queries(current.digest):
                path.unlink(missing_ok=True)
