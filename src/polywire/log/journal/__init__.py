"""The journal: write appends and changes to preallocated files, each batch atomically, and recover them at a start."""
