"""The training: its process, steps, control, saving, telemetry and recovery."""
