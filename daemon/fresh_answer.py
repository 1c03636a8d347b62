"""Does a pool load and answer where nothing else is loaded? `python -m mqmk.daemon.fresh_answer ORDER.json`."""

import json
import sys
from pathlib import Path

import torch

from mqmk.matcher.backbone import HUB, load_backbone
from mqmk.matcher.pool_files import read_pool
from mqmk.matcher.predictor import name_answers, predict


def main(order: Path) -> None:
    """Answer one grey picture; whatever is wrong ends the process with its reason."""
    wanted = json.loads(order.read_text())
    backbone = wanted["backbone"]
    torch.set_num_threads(1)
    vit = load_backbone(backbone["name"], weights=backbone["weights"] or HUB, sha256=backbone["sha256"],
                        image_size=backbone["image_size"], device=torch.device("cpu"))  # fmt: skip
    _, pool = read_pool(Path(wanted["pool"]), vit.info)
    if not pool.tasks:
        return
    picture = torch.zeros(1, 3, vit.info.image_size, vit.info.image_size)
    (answer,) = name_answers(pool, predict(vit, pool, picture))
    known = {label for _, label in pool.labels}
    if answer.label not in known or not 0 <= answer.probability <= 1.0001:
        raise SystemExit(f"an answer that makes no sense: {answer}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
