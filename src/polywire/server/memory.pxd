# C-level face of memory.py for the other compiled modules; it holds declarations only.

from polywire.server.arena cimport Arena
from polywire.server.shared_chunk cimport SharedChunk


cdef class ReceiveMemory:
    cdef object _beyond
    cdef object _connections
    cdef bint _feeding
    cdef long long _looked
    cdef object _soon
    cdef dict _waiting
    cdef public Arena arena
    cdef public SharedChunk shared_chunk
    cdef public long long tick
    cdef public long long write_batch
