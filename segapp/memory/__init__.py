"""What a training will need of each GPU's memory, said before a GPU is touched, and what it was seen to need.

`affine`, `gpu_specs`, `planner`, `advice`, `report` and `calibration` are arithmetic and text: no torch. `recorder` and
`simulated` follow tensors; importing them loads torch.
"""
