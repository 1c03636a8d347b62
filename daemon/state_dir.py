"""The layout of the state directory, and how trained prompts and held-out images are stored there.

ledger.sqlite                 the ledger
pools/                        CURRENT, versions/ (cards) and layers/ (matcher/pool_cards.py)
candidates/<n>-<digest12>.json    a version that is evaluated but not announced yet
work/<identity>/              base/ (what training started from), checkpoint.safetensors, and 0-<digest12>/: the
                              trained prompt as a pool of one; it exists only once training is done
held-out/<identity>.safetensors   images used for evaluation only
evaluations/<digest>.safetensors  scores of a sample of those images, reused by the next version
evaluations/<digest>/         tables and figures of a version's evaluation
"""

import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mqmk.matcher.durable import replace_file, write_folder
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_cards import PoolCard
from mqmk.matcher.pool_files import CARD, TENSORS, PoolFiles, decode, read_pool
from mqmk.matcher.pool_store import PoolStore

NEWEST_EVALUATIONS: Final = 5
"""They stay even if their version is not in the store: one may be about to be published."""
DIGITS: Final = 12
"""Of a digest, in the name of a version's card."""


@dataclass(frozen=True)
class StateDir:
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
        """The held-out images of a task."""
        return self.folder / "held-out" / f"{identity}.safetensors"

    def save_held_out(self, identity: str, data: bytes) -> None:
        """Store the held-out images of a task; durable when this returns."""
        self.held_out(identity).parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.held_out(identity), data)

    @property
    def evaluations(self) -> Path:
        """Evaluations of all versions."""
        return self.folder / "evaluations"

    def records(self, digest: str) -> Path:
        """The score records of one version's evaluation."""
        return self.evaluations / f"{digest}.safetensors"

    def evaluation(self, digest: str) -> Path:
        """The folder with tables and figures of a version's evaluation."""
        return self.evaluations / digest

    def prune_evaluations(self, keep: Collection[str]) -> None:
        """Remove tables and figures of other versions than these, given by the beginnings of their digests."""
        found = [path for path in self.evaluations.glob("*") if path.is_dir()]
        found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in found[NEWEST_EVALUATIONS:]:
            if path.name[:DIGITS] not in keep:
                shutil.rmtree(path, ignore_errors=True)

    def work(self, identity: str) -> Path:
        """The files of a task's training."""
        return self.folder / "work" / identity

    def checkpoint(self, identity: str) -> bytes | None:
        """The checkpoint of the last completed epoch."""
        path = self.work(identity) / "checkpoint.safetensors"
        return path.read_bytes() if path.exists() else None

    def save_checkpoint(self, identity: str, data: bytes) -> None:
        """Store a checkpoint; durable when this returns."""
        self.work(identity).mkdir(parents=True, exist_ok=True)
        replace_file(self.work(identity) / "checkpoint.safetensors", data)

    def trained_folder(self, identity: str) -> Path | None:
        """The folder of the trained prompt, None while there is none."""
        return next(iter(self.work(identity).glob("0-*")), None)

    def read_trained(self, identity: str) -> PromptPool:
        """The trained prompt as a pool of one."""
        folder = self.trained_folder(identity)
        if folder is None:
            raise FileNotFoundError(f"{self.work(identity)}: no trained prompt")
        return read_pool(folder)[1]

    def save_trained(self, identity: str, prompt: PoolFiles) -> Path:
        """Store a trained prompt, whole or not at all."""
        version, _ = decode(prompt)
        return self._save(self.work(identity) / version.folder, prompt)

    def base(self, identity: str) -> PoolFiles | None:
        """What the task's training started from."""
        folder = self.work(identity) / "base"
        return PoolFiles((folder / TENSORS).read_bytes(), (folder / CARD).read_bytes()) if folder.is_dir() else None

    def save_base(self, identity: str, base: PoolFiles) -> None:
        """Fix what the task's training starts from: after a resume it must be the same."""
        self._save(self.work(identity) / "base", base)

    def _save(self, final: Path, files: PoolFiles) -> Path:
        write_folder(final, {TENSORS: files.tensors, CARD: files.card})
        return final

    def clear_work(self, identity: str) -> None:
        """Remove everything that training made."""
        shutil.rmtree(self.work(identity), ignore_errors=True)

    def drop_candidate(self, card: str) -> None:
        """Remove the card of a version that will not be announced; its layers are collected with all others."""
        (self.candidates / card).unlink(missing_ok=True)

    def candidate_cards(self) -> list[PoolCard]:
        """The readable cards of versions that are not announced yet: their layers are still needed."""
        found = []
        for path in self.candidates.glob("*.json"):
            with suppress(FileNotFoundError, PoolError):
                found.append(self.store.parse(path.read_bytes()))
        return found

    def purge(self, identity: str) -> None:
        """Remove everything made from a task's data except published versions."""
        self.clear_work(identity)
        for card in self.candidate_cards():
            if any(task.manifest_sha256 == identity for task in card.tasks):
                self.drop_candidate(card.identity.card)
        self.held_out(identity).unlink(missing_ok=True)
        current = self.store.current()
        for path in self.evaluations.glob("*.safetensors"):  # they contain scores of its images
            if current is None or path != self.records(current.digest):
                path.unlink(missing_ok=True)
