# C-level face of memory.py for the other compiled modules; it holds declarations only.

cdef class Arena:
    cdef dict _free
    cdef dict _rested
    cdef public list viewed
    cdef public object bytes_max
    cdef public object pooled_bytes
    cdef public object out_bytes


cdef class SharedChunk:
    cdef object _arena
    cdef object _chunk
    cdef object _view
    cdef public object lent
    cdef public Py_ssize_t lent_at
    cdef public Py_ssize_t position
    cdef public object reader


cdef class ReceiveMemory:
    cdef object _beyond
    cdef object _connections
    cdef bint _feeding
    cdef long long _looked
    cdef object _soon
    cdef dict _waiting
    cdef int _wasted
    cdef public Arena arena
    cdef public SharedChunk shared_chunk
    cdef public long long tick
    cdef public long long write_batch
