# C-level face of arena.py for the other compiled modules; it holds declarations only.

cdef class Arena:
    cdef dict _free
    cdef dict _rested
    cdef public list viewed
    cdef public object bytes_max
    cdef public object kept_bytes
    cdef public object out_bytes
