"""The memory plan: predicted GPU memory of a training, its calibration by measurements, and out-of-memory reports.

`affine`, `gpu_specs`, `planner`, `advice`, `report` and `calibration` are arithmetic and text, without torch.
`simulated` runs one training step on simulated devices and records the tensors; it loads torch.
"""
