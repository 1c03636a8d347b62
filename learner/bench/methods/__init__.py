"""The methods of `mqmk-daemon bench compare`: a file each, found by `registry.py`; what they share is in `parts/`."""
