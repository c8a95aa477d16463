"""The segments: immutable blobs that hold what left the journal, how they are written, replaced and removed."""
