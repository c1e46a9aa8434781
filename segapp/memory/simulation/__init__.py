"""One training step on simulated devices: its jobs, the devices, what records their memory, and DDP buckets."""
