"""`mqmk-daemon bench`: the benchmarks, a file each."""
