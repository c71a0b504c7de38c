"""What is measured on the day a GPU is there; `scripts/gpu_report.sh` runs all of it."""
