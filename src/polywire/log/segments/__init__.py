"""Write, merge, compact, read and delete segments: immutable files of batches that were moved out of the journal."""
