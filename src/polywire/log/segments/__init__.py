"""Segments: immutable blobs with data that was moved out of the journal. They are written, replaced and removed here."""
