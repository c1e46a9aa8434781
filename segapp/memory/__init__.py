"""Memory of a training: peaks per device, the judge of batch splits, the memory plan, counters, out-of-memory reports.

`peaks`, `judge`, `plan` and `report` are arithmetic and text, without torch: the TUI and `segapp ctl`
import the judge. `ledger` and `simulated_devices` record the tensors of a training step; they import torch.
"""
