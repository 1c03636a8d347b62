"""Score records on disk, one file for each of the latest builds, so that the next build computes only what is new.

A file that is damaged or of another format is as good as none: what it held can be computed again.
"""

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from mqmk.learner.evaluation.query_table import TableNames
from mqmk.learner.evaluation.score_records import ScoreRecords
from mqmk.matcher.durable import replace_file

FORMAT: Final = "4"
MAX_FILES: Final = 3


def load_nearest_records(folder: Path, wanted: TableNames) -> ScoreRecords | None:
    """The records that have most of what is wanted, memory-mapped; the newest ones of equals."""
    known = {path: names for path in _newest(folder) if (names := _read_names(path))}
    best = max(known, key=lambda path: known[path].shared_with(wanted), default=None)
    with suppress(OSError, SafetensorError, TypeError):
        return None if best is None else ScoreRecords(known[best], **load_file(best))
    return None


def save_records(path: Path, records: ScoreRecords) -> None:
    """Write records, and drop all but the newest few beside them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: getattr(records, name) for name in ScoreRecords.__dataclass_fields__ if name != "names"}
    replace_file(path, save(tensors, {"format": FORMAT, "names": json.dumps(asdict(records.names))}))
    for old in _newest(path.parent)[MAX_FILES:]:
        old.unlink(missing_ok=True)


def _newest(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime, reverse=True)


def _read_names(path: Path) -> TableNames | None:
    with suppress(OSError, SafetensorError), safe_open(path, framework="pt") as file:
        about = file.metadata() or {}
        if about.get("format") == FORMAT:
            names = json.loads(about["names"])
            return TableNames(**names | {each: tuple(names[each]) for each in ("images", "prompts", "sizes")})
    return None
