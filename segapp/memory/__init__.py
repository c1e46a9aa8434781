"""Memory of a training: peaks per device, the check of batch splits, the memory plan, counters, out-of-memory reports.

`peaks`, `split_check`, `plan` and `report` are arithmetic and text, without torch: the TUI and `segapp ctl`
import `split_check`. `ledger` and `simulated_devices` record the tensors of a training step; they import torch.
"""
