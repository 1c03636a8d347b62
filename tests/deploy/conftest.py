"""Lets the tests of serving import what they share: pools with fingerprints, bad pools, load."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
