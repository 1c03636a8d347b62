"""How the embedded backbone is pretrained: run from a checkout (`make pretrain`), not part of the wheel."""
