"""Measurements on a GPU; `scripts/gpu_report.sh` runs all of them."""
