"""One training step on simulated devices: its jobs, the devices, and DDP buckets."""
