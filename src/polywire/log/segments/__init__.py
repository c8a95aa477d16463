"""Segments: immutable blobs with data that has left the journal. They are written, replaced and removed here."""
