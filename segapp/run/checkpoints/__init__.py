"""The `checkpoints` folder of a run, and the commit protocol that keeps the newest ones through a crash. No torch here.

```
checkpoints/
  manifest.json                     the committed checkpoints: sha256, size and step of each, and the alias names
  objects/00000120-3fa9c1d2….pt     the files; each is written once under a new name and never changed
  last.pt best.pt epoch_0007.pt     aliases: hard links to objects, for users and other programs
```

A checkpoint is committed when `manifest.json`, which has its sha256, is renamed into place:

1. write `objects/.tmp-…` (same directory, must not exist, mode 0600), computing the hash in the same pass; fsync;
2. rename it to its own name; fsync `objects/`;
3. replace `manifest.json` (temporary file, fsync, rename, fsync of the directory): **committed**;
4. point `last.pt`, `epoch_0007.pt`, `best.pt` at it (link to a temporary name, rename over the old);
5. remove the objects that the manifest no longer lists.

Only the manifest decides which checkpoint an alias refers to; a crash between 3 and 5 leaves aliases that the next
commit repairs. "Newest" is the order of commits, not the step: a run that was set back to epoch 3 continues from there.
The two newest checkpoints are always kept, whatever `keep` is.

manifest.py reads, changes and writes the manifest; store.py commits, reads and verifies checkpoints, and repairs the
aliases.
"""

# isort: skip_file
# `as` marks a public name for linters and type checkers; this is the only list of public names.

from segapp.run.checkpoints.manifest import (
    BEST as BEST,
    FORMAT as FORMAT,
    LAST as LAST,
    CheckpointEntry as CheckpointEntry,
    CheckpointFacts as CheckpointFacts,
    DamagedError as DamagedError,
    Manifest as Manifest,
    open_if_intact as open_if_intact,
)
from segapp.run.checkpoints.store import CheckpointFolder as CheckpointFolder, CheckpointStatus as CheckpointStatus
