# C-level face of sequential.py for the other compiled modules; it holds declarations only.

cdef class BareSequential:
    cdef public object _awaited
    cdef public bint _held
    cdef public object _phase
    cdef public long _reasons
    cdef public bint _receiving
    cdef public object _rest
    cdef public object _resume
    cdef public long long _short_bytes_max
    cdef public long long _wanted
    cdef public object broker
    cdef public object output
    cdef public long long requests
    cdef public object take_repeated
