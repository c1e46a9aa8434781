"""Memory of a training: peaks of its devices, the judge of splits, the memory plan, counters, out-of-memory reports.

`peaks`, `judge`, `plan`, `calibration` and `report` are arithmetic and text, without torch: the screen and
`segapp ctl` import the judge. `ledger` and `simulated_devices` record the tensors of a training step; they load torch.
"""
